"""Ahead and overhead: what is concluded from rows, and runs that are too small to show anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.ahead import AHEAD, OVERHEAD, frontier, margin
from dilaserve_bench.experiments.document import Row
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def row(
    policy: str, rate: float, attainment: float, threshold: float, overhead: float = 1.5
) -> Row:
    return Row(
        policy=policy, rate=rate, slo_s=9.5, overhead=overhead, attainment=attainment, ci95=0.01,
        mean_threshold=threshold, p50_s=1.0, p99_s=2.0,
    )  # fmt: skip


ROWS = [
    row("fixed-0.8", 2.0, 0.6, 0.8),
    row("fixed-0.7", 2.0, 1.0, 0.7),
    row("fixed-0.7", 1.0, 1.0, 0.7),
]


def test_fixed_thresholds_are_the_frontier() -> None:
    assert frontier(ROWS, 2.0) == [(0.7, 1.0), (0.8, 0.6)]


@pytest.mark.parametrize(
    ("threshold", "attainment", "expected"), [(0.75, 0.9, 0.1), (0.7, 0.99, -0.01), (0.8, 0.6, 0.0)]
)
def test_distance_from_the_frontier(threshold: float, attainment: float, expected: float) -> None:
    ours = row("dilaserve", 2.0, attainment, threshold)
    assert margin(frontier(ROWS, 2.0), ours) == pytest.approx(expected)


def test_beyond_the_frontier_nothing_is_said() -> None:
    assert margin(frontier(ROWS, 2.0), row("dilaserve", 2.0, 1.0, 0.85)) is None


def test_quick_run_compares_all_that_was_asked_for(tmp_path: Path) -> None:
    policies = ("dilaserve", "tediserve", "fixed-0.8", "fixed-0.9")
    with session(tmp_path / "points", seeds=1, policies=policies, rates=(1.5, 2.0)) as each:
        document = AHEAD.run(each)
    assert [(r.policy, r.rate) for r in document.rows] == [
        (policy, rate) for rate in (1.5, 2.0) for policy in policies
    ]
    assert [both["rate"] for both in document.found["both_99"]] == [1.5, 2.0]
    assert set(document.found["rate_at_95"]) == set(policies)
    assert "dilaserve" in as_text(AHEAD.page(document), is_quick=True, is_complete=True)
    assert AHEAD.draw is not None
    AHEAD.draw(document)


def test_rates_follow_the_overhead(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, overhead=0.7975, policies=("fixed-0.9",)) as each:
        document = AHEAD.run(each)
    assert [r.rate for r in document.rows] == [3.5, 3.75]  # twice 1.75 and 1.875
    assert {r.overhead for r in document.rows} == {0.7975}


def test_quick_run_by_overhead(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, policies=("infaas",), rates=(1.5,)) as each:
        document = OVERHEAD.run(each)
    assert [r.overhead for r in document.rows] == [1.0, 1.1, 1.25, 1.595]
    assert "1.034" in as_text(OVERHEAD.page(document), is_quick=True, is_complete=True)


@pytest.mark.parametrize("policy", ["fixed-nan", "fixed-7", "fixed--0.1", "fixed-", "magic"])
def test_policies_that_are_none_are_named(tmp_path: Path, policy: str) -> None:
    with (
        session(tmp_path / "points.jsonl", policies=(policy,), rates=(1.5,)) as given,
        pytest.raises(DiLaServeError, match="--policies"),
    ):
        AHEAD.run(given)
