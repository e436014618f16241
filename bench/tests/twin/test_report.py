"""Figures of runs, and how sure they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.twin.clients import Outcome, Served
from dilaserve_bench.twin.measure import Measurements
from dilaserve_bench.twin.plot import save_plot
from dilaserve_bench.twin.report import estimate, report, report_run
from dilaserve_bench.twin.scheduler import CoreCalls
from dilaserve_bench.twin.simulation import Run
from dilaserve_bench.twin.text import as_lines
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.workload import Arrival

from .helpers import arrivals, run, scenario


def served(at_s: float, ended_at: float, outcome: Outcome = "done", right: bool | None = None):  # type: ignore[no-untyped-def]
    arrival = Arrival(request_id="r", at_s=at_s, n_prompt=1, n_output=1, case=0, slo_s=2.0)
    return Served(arrival, outcome, ended_at, right)


def made_up(*requests: Served, virtual_s: float = 10.0) -> Run:
    return Run(
        seed=0,
        served=list(requests),
        measured=Measurements(Timeline(), slot_s=1.0),
        utilisation=0.5,
        virtual_s=virtual_s,
        n_events=10,
        wall_s=2.0,
        core_calls=CoreCalls(),
        is_complete=all(request.outcome != "unfinished" for request in requests),
    )


def test_whoever_was_not_served_in_time_missed() -> None:
    figures = report_run(
        made_up(
            served(0.0, 2.0),
            served(0.0, 2.1),
            served(1.0, 1.5, "failed"),
            served(1.0, 1.5, "refused"),
            served(7.9, 0.0, "unfinished"),
        )
    )
    assert figures.attainment == 1 / 5
    assert (figures.n_done, figures.n_failed, figures.n_refused) == (2, 1, 1)
    assert figures.p50_s == pytest.approx(2.05)
    assert not figures.is_complete


def test_whose_time_is_not_up_does_not_count_yet() -> None:
    figures = report_run(made_up(served(0.0, 1.0), served(8.1, 0.0, "unfinished")))
    assert (figures.n_requests, figures.attainment) == (1, 1.0)


def test_only_judged_answers_are_right_or_wrong() -> None:
    requests = [served(0.0, 1.0, right=True), served(0.0, 3.0, right=False), served(0.0, 1.0)]
    figures = report_run(made_up(*requests))
    assert (figures.accuracy, figures.accuracy_in_time) == (0.5, 1.0)
    assert report_run(made_up(served(0.0, 1.0))).accuracy is None


def test_slots_count_by_arrival() -> None:
    slots = report_run(made_up(served(0.5, 1.0), served(0.9, 9.0), served(2.0, 3.0))).slots
    assert [slot.n_arrived for slot in slots[:4]] == [2, 0, 1, 0]
    assert [slot.n_in_time for slot in slots[:4]] == [1, 0, 1, 0]


def test_percentiles_are_those_of_the_latencies() -> None:
    figures = report_run(made_up(*(served(0.0, k / 100) for k in range(201))))
    assert figures.percentiles_s == pytest.approx([2 * k / 100 for k in range(101)])
    assert figures.p99_s == pytest.approx(1.98)


def test_confidence_is_students() -> None:
    """Of 1, 2, 3, 4: mean 2.5, standard error 0.6455, t(3) = 3.182."""
    known = estimate([1.0, 2.0, 3.0, 4.0])
    assert known is not None
    assert known.mean == 2.5
    assert known.ci95 == pytest.approx(3.182 * 0.645497, rel=1e-4)
    single = estimate([1.0, None])
    assert single is not None
    assert (single.mean, single.ci95) == (1.0, None)
    assert estimate([None]) is None


def test_report_of_nothing_and_of_something_can_be_read_and_drawn(tmp_path: Path) -> None:
    runs = [report_run(run(scenario(), arrivals([0.1, 0.2])))]
    for each in (report({"policy": "infaas", "slo_s": 9.5}, runs), report({}, [])):
        assert as_lines(each)
        save_plot(each, tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
    assert "served                             2" in "\n".join(
        as_lines(report({"policy": "infaas"}, runs))
    )
