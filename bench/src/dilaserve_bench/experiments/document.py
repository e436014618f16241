"""What every experiment prints with `--json`: rows of ours beside what was published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dilaserve_bench.twin.report import Estimate, RunReport, estimate

__all__ = ["Document", "Row", "row_of"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds at one point of a curve."""

    policy: str
    rate: float
    """Arrivals a second, per GPU."""
    slo_s: float
    attainment: float
    ci95: float | None
    """Of the attainment: half the width of the interval; None for a single seed."""
    mean_threshold: float | None
    """Over steps."""
    accuracy: float | None
    """None where steps were recorded and there are no answers."""
    p50_s: float | None
    p99_s: float | None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment."""

    name: str
    seeds: list[int]
    n: int
    """Requests of each run."""
    rows: list[Row]
    published: dict[str, Any]
    found: dict[str, Any]
    """What was fitted or derived."""
    is_quick: bool
    """Whether it only tries the plumbing: nothing may be claimed from it."""
    is_complete: bool
    """False if it was interrupted."""


def row_of(policy: str, rate: float, slo_s: float, runs: Iterable[RunReport]) -> Row | None:
    """The mean of complete runs; None without any."""
    complete = [run for run in runs if run.is_complete]
    attainment = estimate(run.attainment for run in complete)
    if attainment is None:
        return None
    return Row(
        policy=policy,
        rate=rate,
        slo_s=slo_s,
        attainment=attainment.mean,
        ci95=attainment.ci95,
        mean_threshold=_mean(estimate(run.mean_threshold for run in complete)),
        accuracy=_mean(estimate(run.accuracy for run in complete)),
        p50_s=_mean(estimate(run.p50_s for run in complete)),
        p99_s=_mean(estimate(run.p99_s for run in complete)),
    )


def _mean(value: Estimate | None) -> float | None:
    return value.mean if value is not None else None
