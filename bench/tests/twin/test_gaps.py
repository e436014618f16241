"""How long cache steps let their requests wait."""

from __future__ import annotations

import pytest

from dilaserve_bench.twin.report import report_run

from .helpers import arrivals, run, scenario, spec


def test_gaps_are_those_of_cache_steps() -> None:
    """One request alone: every pass is a step, and a cache step's pass is its pause."""
    done = run(scenario(spec("1xtp1"), time_gaps=True), arrivals([0.0]))
    report = report_run(done)
    assert done.measured.gaps is not None
    assert len(done.measured.gaps.seconds) == report.n_cache > 0
    assert report.gap_s == pytest.approx(0.01, abs=0.002)  # 16 tokens, and the loop around it
    assert report.gap_p99_s is not None
    assert report.gap_p99_s >= report.gap_s


def test_recomputes_of_others_hold_a_cache_step_up() -> None:
    alone = report_run(run(scenario(spec("1xtp1"), time_gaps=True), arrivals([0.0])))
    beside = report_run(run(scenario(spec("1xtp1"), time_gaps=True), arrivals([0.0, 0.05, 0.11])))
    assert beside.gap_p99_s > 2 * alone.gap_p99_s  # type: ignore[operator]


def test_gaps_are_timed_only_when_asked_for() -> None:
    report = report_run(run(scenario(spec("1xtp1")), arrivals([0.0])))
    assert report.gap_s is report.gap_p99_s is None
