"""Spans of a run: who arrived in them, and at which thresholds steps ran meanwhile."""

from __future__ import annotations

import pytest

from dilaserve_bench.experiments.spans import report_span, report_spans
from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.measure import Measurements, Slot
from dilaserve_bench.twin.scheduler import CoreCalls
from dilaserve_bench.twin.simulation import Run
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.workload import Arrival


def served(at_s: float, latency_s: float | None) -> Served:
    arrival = Arrival(request_id=str(at_s), at_s=at_s, n_prompt=1, n_output=1, case=0, slo_s=2.0)
    if latency_s is None:
        return Served(arrival)
    return Served(arrival, outcome="done", ended_at=at_s + latency_s)


def run(*requests: Served) -> Run:
    measured = Measurements(Timeline(), slot_s=5.0)
    measured.slots = {
        0: Slot(n_steps=10, threshold_sum=9.0),
        1: Slot(n_steps=30, threshold_sum=21.0),
    }
    return Run(
        seed=0, served=list(requests), measured=measured, utilisation=0.0, virtual_s=20.0,
        n_events=0, wall_s=0.0, core_calls=CoreCalls(), is_complete=True,
    )  # fmt: skip


def test_a_span_counts_those_that_arrived_in_it() -> None:
    done = run(served(1.0, 1.0), served(2.0, 3.0), served(4.9, None), served(5.0, 1.0))
    span = report_span(done, 0.0, 5.0)
    assert span.n == 3
    assert span.attainment == pytest.approx(1 / 3, abs=1e-4)
    assert (span.p50_s, span.mean_threshold) == (2.0, 0.9)


def test_thresholds_weigh_by_their_steps() -> None:
    assert report_span(run(), 0.0, 10.0).mean_threshold == pytest.approx(0.75)


def test_spans_cover_all_arrivals_and_say_where_nobody_came() -> None:
    spans = report_spans(run(served(1.0, 1.0), served(11.0, 9.0)), 5.0)
    assert [span.n for span in spans] == [1, 0, 1]
    assert [span.attainment for span in spans] == [1.0, None, 0.0]
    assert [span.mean_threshold for span in spans] == [0.9, 0.7, None]
