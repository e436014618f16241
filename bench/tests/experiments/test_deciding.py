"""The cost of deciding: which calls count, and the plumbing on a small cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments import deciding
from dilaserve_bench.experiments.deciding import EXPERIMENT, Size, row_of_run
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.measure import Measurements
from dilaserve_bench.twin.scheduler import CoreCalls
from dilaserve_bench.twin.simulation import Run
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.workload import Arrival

from .helpers import session

SIZE = Size(instances=2, rate=1.0, warm_s=10.0, measured_s=20.0)


def served(at_s: float, ended_at: float | None) -> Served:
    arrival = Arrival(request_id=str(at_s), at_s=at_s, n_prompt=1, n_output=1, case=0)
    return Served(arrival) if ended_at is None else Served(arrival, "done", ended_at)


def run() -> Run:
    calls = CoreCalls()
    for at_s, seconds, kind in [
        (9.0, 5.0, "StepResult"),  # too early to count
        (10.0, 0.001, "Heartbeat"),
        (11.0, 0.002, "StepResult"),
        (12.0, 0.004, "StepResult"),
        (13.0, 0.009, "tick"),
        (30.0, 5.0, "StepResult"),  # too late
    ]:
        calls.add(at_s, seconds, kind)
    requests = [served(0.0, 20.0), served(15.0, None), served(1.0, 9.0)]
    return Run(
        seed=0, served=requests, measured=Measurements(Timeline(), slot_s=1.0), utilisation=0.0,
        virtual_s=31.0, n_events=0, wall_s=0.0, core_calls=calls, is_complete=False,
    )  # fmt: skip


def test_only_the_calls_under_steady_load_count() -> None:
    row = row_of_run("dilaserve", SIZE, run())
    assert (row.n_events, row.events_per_s) == (4, 0.2)
    assert row.mean_ms == pytest.approx(4.0)
    assert (row.max_ms, row.result_ms, row.tick_ms) == (9.0, 3.0, 9.0)


def test_active_requests_are_a_mean_over_time() -> None:
    row = row_of_run("dilaserve", SIZE, run())
    assert row.requests == round((10.0 + 15.0) / 20.0)


def test_every_call_of_the_core_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Size(instances=2, rate=2.0, warm_s=2.0, measured_s=20.0)
    monkeypatch.setattr(deciding, "SIZES", (small,))
    with session(tmp_path / "points") as asked:
        document = EXPERIMENT.run(asked)
    (row,) = document.rows
    assert row.instances == 2
    assert row.requests > 0
    assert row.result_ms is not None
    assert row.tick_ms is not None
    assert 0 < row.mean_ms <= row.p99_ms <= row.max_ms
    assert "thread CPU time" in as_text(
        EXPERIMENT.page(document), is_quick=True, is_complete=document.is_complete
    )
