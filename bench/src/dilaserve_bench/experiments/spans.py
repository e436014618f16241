"""One run cut into spans of time: what became of those that arrived in each, and at which
thresholds steps ran meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.report import quantile
from dilaserve_bench.twin.simulation import Run

__all__ = ["SpanReport", "mean_threshold", "report_span", "report_spans"]

DIGITS = 5


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """A span of time. What counts requests goes by their arrival."""

    at_s: float
    n: int
    """Requests."""
    attainment: float | None
    """None where nobody arrived."""
    mean_threshold: float | None
    """Over the steps that ended in it."""
    p50_s: float | None
    p99_s: float | None


def report_span(run: Run, start_s: float, end_s: float) -> SpanReport:
    """From `start_s` to before `end_s`; thresholds by the run's slots that begin in it."""
    return _report(run, start_s, end_s, [s for s in run.served if _arrived(s, start_s, end_s)])


def report_spans(run: Run, length_s: float) -> list[SpanReport]:
    """Spans of equal length, from the start to the last arrival."""
    groups: dict[int, list[Served]] = {}
    for served in run.served:
        groups.setdefault(int(served.arrival.at_s / length_s), []).append(served)
    return [
        _report(run, number * length_s, (number + 1) * length_s, groups.get(number, []))
        for number in range(max(groups, default=-1) + 1)
    ]


def mean_threshold(run: Run, start_s: float, end_s: float) -> float | None:
    """Over the steps that ended in the slots that begin there; None if there were none."""
    measured = run.measured
    slots = [
        slot
        for number, slot in measured.slots.items()
        if start_s <= number * measured.slot_s < end_s
    ]
    n_steps = sum(slot.n_steps for slot in slots)
    return sum(slot.threshold_sum for slot in slots) / n_steps if n_steps else None


def _report(run: Run, start_s: float, end_s: float, arrived: Sequence[Served]) -> SpanReport:
    latencies = sorted(served.latency_s for served in arrived if served.outcome == "done")
    return SpanReport(
        at_s=start_s,
        n=len(arrived),
        attainment=_rounded(sum(s.in_time for s in arrived) / len(arrived)) if arrived else None,
        mean_threshold=_rounded(mean_threshold(run, start_s, end_s)),
        p50_s=_rounded(quantile(latencies, 0.5)),
        p99_s=_rounded(quantile(latencies, 0.99)),
    )


def _arrived(served: Served, start_s: float, end_s: float) -> bool:
    return start_s <= served.arrival.at_s < end_s


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
