"""How virtual instances price a pass, and whom they wait for."""

from __future__ import annotations

import pytest

from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_bench.twin.options import core_settings
from dilaserve_bench.twin.report import RunReport, report_run

from .helpers import arrivals, run, scenario, spec

ZIGZAG = ProfileSet(
    model="test",
    device="none",
    profiles=[
        LatencyProfile(tp_degree=1, points=[Point(16, 0.01), Point(128, 0.05), Point(256, 0.03)])
    ],
)


@pytest.mark.parametrize(
    ("lookup", "recompute_s", "cache_s"),
    [
        ("smoothed", 0.04, 0.01),  # 128 tokens: 50 and 30 ms become 40 for both; 16: as measured
        ("ceil", 0.05, 0.01),
    ],
)
def test_a_pass_is_priced_smoothed_or_as_the_next_measured_size(
    lookup: str, recompute_s: float, cache_s: float
) -> None:
    """One request of 64 + 64 tokens in four blocks of 16 and, at 0.9, 23 steps."""
    cluster = spec("1xtp1", lookup=lookup)
    report = report_run(run(scenario(cluster, profiles=ZIGZAG), arrivals([0.0])))
    busy_s = report.utilisation * report.virtual_s
    assert busy_s == pytest.approx(4 * recompute_s + 19 * cache_s, rel=1e-6)


def test_between_two_measured_sizes_the_larger_counts() -> None:
    cluster = spec("1xtp1", lookup="ceil")
    report = report_run(run(scenario(cluster, profiles=ZIGZAG), arrivals([0.0], n_prompt=65)))
    busy_s = report.utilisation * report.virtual_s
    assert busy_s == pytest.approx(4 * 0.03 + 19 * 0.01, rel=1e-6)


KINDS = ProfileSet(
    model="test",
    device="none",
    profiles=[
        LatencyProfile(
            tp_degree=1,
            points=[
                Point(16, 0.01, "cache", 1, 64),
                Point(16, 0.02, "cache", 1, 192),
                Point(128, 0.05, "recompute", 1, 128),
            ],
        )
    ],
)


@pytest.mark.parametrize(
    ("lookup", "cache_s"),
    [("smoothed", 0.015), ("ceil", 0.01)],  # 128 keys lie between 64 and 192; ceil tells no kinds
)
def test_a_pass_is_priced_by_its_kind_and_keys_where_they_were_measured(
    lookup: str, cache_s: float
) -> None:
    cluster = spec("1xtp1", lookup=lookup)
    report = report_run(run(scenario(cluster, profiles=KINDS), arrivals([0.0])))
    busy_s = report.utilisation * report.virtual_s
    assert busy_s == pytest.approx(4 * 0.05 + 19 * cache_s, rel=1e-6)


def passes(run_ahead: int | None, *, lock_step: bool) -> RunReport:
    cluster = spec("1xtp1", lock_step=lock_step)
    core = core_settings(cluster.heartbeat_s, run_ahead)
    workload = arrivals([0.1 * n for n in range(12)])
    return report_run(run(scenario(cluster, core=core), workload))


def test_in_lock_step_a_pass_waits_for_all_of_its_instance() -> None:
    """Without waiting, those that come while others compute make a half batch of their own."""
    free = passes(None, lock_step=False)
    halves = passes(1, lock_step=False)
    locked = passes(1, lock_step=True)
    assert locked.n_done == halves.n_done == free.n_done == 12
    assert locked.n_passes < 0.8 * halves.n_passes
    assert locked.n_passes == pytest.approx(free.n_passes, rel=0.1)
