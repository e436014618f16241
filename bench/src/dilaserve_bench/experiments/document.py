"""What every experiment prints with `--json`: rows of ours beside what was published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from dilaserve_bench.twin.report import Estimate, RunReport, estimate

__all__ = ["DIGITS", "Document", "Row", "row_of"]

R = TypeVar("R")
DIGITS = 6
"""Behind the point, of kept figures."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds at one point of a curve."""

    policy: str
    rate: float
    """Arrivals a second, per GPU."""
    slo_s: float
    overhead: float
    attainment: float
    ci95: float | None
    """Of the attainment: half the width of the interval; None for a single seed."""
    mean_threshold: float | None
    """Over steps."""
    mean_token_threshold: float | None = None
    accuracy: float | None = None
    """None where steps were recorded and there are no answers."""
    mean_s: float | None = None
    p50_s: float | None
    p99_s: float | None


class Document(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One experiment. What a row is, is each experiment's own."""

    name: str
    seeds: list[int]
    n: int
    """Requests of each run; what else it counts, the experiment says."""
    rows: list[R]
    published: dict[str, Any]
    """What the paper or its artifact has, with its source; empty where there is nothing."""
    found: dict[str, Any]
    """What was fitted or derived."""
    is_quick: bool
    """Whether it only tries the plumbing: nothing may be claimed from it."""
    is_complete: bool
    """False if it was interrupted."""
    command: str = ""
    """What repeats it."""
    commit: str | None = None
    """Of the code that ran, `+` behind it if that had changes; None outside of a checkout."""


def row_of(
    policy: str, rate: float, slo_s: float, overhead: float, runs: Iterable[RunReport]
) -> Row | None:
    """The mean of complete runs; None without any."""
    complete = [run for run in runs if run.is_complete]
    attainment = estimate(run.attainment for run in complete)
    if attainment is None:
        return None
    return Row(
        policy=policy,
        rate=rate,
        slo_s=slo_s,
        overhead=overhead,
        attainment=round(attainment.mean, DIGITS),
        ci95=None if attainment.ci95 is None else round(attainment.ci95, DIGITS),
        mean_threshold=_mean(estimate(run.mean_threshold for run in complete)),
        mean_token_threshold=_mean(estimate(run.mean_token_threshold for run in complete)),
        accuracy=_mean(estimate(run.accuracy for run in complete)),
        mean_s=_mean(estimate(run.mean_s for run in complete)),
        p50_s=_mean(estimate(run.p50_s for run in complete)),
        p99_s=_mean(estimate(run.p99_s for run in complete)),
    )


def _mean(value: Estimate | None) -> float | None:
    return round(value.mean, DIGITS) if value is not None else None
