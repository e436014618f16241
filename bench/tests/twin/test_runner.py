"""Several seeds, and Ctrl-C."""

from __future__ import annotations

import io
import signal

import pytest
from rich.console import Console

from dilaserve_bench.twin.options import recorded_source
from dilaserve_bench.twin.recorded import RecordedSource
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.runner import Watch, run_seeds, watching
from dilaserve_bench.twin.simulation import Run, Scenario
from dilaserve_bench.twin.workload import Workload

from .helpers import TABLE, arrivals, scenario

WORKLOAD = arrivals([0.1 * k for k in range(1, 200)])


def runs(each: Scenario, watch: Watch, seeds: range) -> list[Run]:
    return list(run_seeds(each, lambda _: WORKLOAD, seeds, watch=watch, timer=lambda: 0.0))


def test_one_run_per_seed() -> None:
    with watching(Console(file=io.StringIO())) as watch:
        done = runs(scenario(), watch, range(3, 5))
    assert [run.seed for run in done] == [3, 4]
    assert all(run.is_complete for run in done)


def test_ctrl_c_keeps_what_there_is() -> None:
    n_begun = 0

    def source(workload: Workload) -> RecordedSource:
        built = recorded_source(TABLE, workload)
        begin = built.begin

        def begin_and_interrupt(request):  # type: ignore[no-untyped-def]
            nonlocal n_begun
            n_begun += 1
            if n_begun == 250:  # in the second run
                signal.raise_signal(signal.SIGINT)
            return begin(request)

        built.begin = begin_and_interrupt  # type: ignore[method-assign]
        return built

    before = signal.getsignal(signal.SIGINT)
    with watching(Console(file=io.StringIO())) as watch:
        done = runs(scenario(source=source), watch, range(3))
    assert signal.getsignal(signal.SIGINT) is before
    assert [(run.seed, run.is_complete) for run in done] == [(0, True), (1, False)]
    assert 0 < report_run(done[1]).n_requests < len(WORKLOAD)


def test_a_second_ctrl_c_ends_the_process() -> None:
    # In the background of a shell, a process begins with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with watching(Console(file=io.StringIO())) as watch:
            signal.raise_signal(signal.SIGINT)
            assert watch.is_stopped
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
