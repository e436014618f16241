"""From runs to figures: attainment, latencies, thresholds, steps, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.configurations import Configuration, PlanNote
from dilaserve_bench.twin.simulation import Run

__all__ = [
    "Estimate",
    "Report",
    "RunReport",
    "SlotReport",
    "estimate",
    "quantile",
    "report",
    "report_run",
]

# 97.5 % quantiles of Student's t by degrees of freedom, from 1.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z_975 = 1.960


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds; the true one lies within `ci95` of it with 95 % confidence (Student's
    t). `ci95` is None for a single seed."""

    mean: float
    ci95: float | None


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a slot of time."""

    at_s: float
    """Its begin."""
    n_arrived: int
    n_in_time: int
    """Of those that arrived in it."""
    n_counted: int
    """Of those that arrived in it, whose fate is known."""
    mean_threshold: float | None
    """Over the steps that ended in it."""
    busy_s: float
    """Over all instances, in passes that ended in it."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies are those of requests that were served to the end."""

    seed: int
    is_complete: bool
    n_requests: int
    """Those that count: all, or if the run was broken off those whose fate was known then."""
    n_done: int
    n_failed: int
    n_refused: int
    attainment: float
    """Share with the last token within the SLO; whoever was not served to the end missed it."""
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    percentiles_s: list[float]
    """0 to 100; empty where nobody was served."""
    mean_threshold: float | None
    """Over steps."""
    mean_token_threshold: float | None
    """Over tokens."""
    accuracy: float | None
    """Share of right answers among those served; None where nobody can say."""
    accuracy_in_time: float | None
    n_recompute: int
    n_cache: int
    n_rebuilds: int
    moves: dict[str, int]
    """Changes of owner by cause (core.effects.MoveCause)."""
    n_passes: int
    rows_per_pass: float
    tokens_per_pass: float
    gap_s: float | None = None
    """Mean pause before a cache step, from the end of the request's step before to its own; None
    where it was not timed."""
    gap_p99_s: float | None = None
    utilisation: float
    """Share of the instances' time spent in passes."""
    virtual_s: float
    n_events: int
    wall_s: float
    slots: list[SlotReport]
    configurations: list[Configuration] = []
    """Where there is a planner: what served, from when on."""
    plans: list[PlanNote] = []


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Several seeds of one scenario."""

    scenario: dict[str, object]
    seeds: list[int]
    attainment: Estimate | None
    mean_s: Estimate | None
    p50_s: Estimate | None
    p90_s: Estimate | None
    p99_s: Estimate | None
    mean_threshold: Estimate | None
    mean_token_threshold: Estimate | None
    accuracy: Estimate | None
    utilisation: Estimate | None
    events_per_s: float
    """Events of the twin per second of the machine that ran it."""
    runs: list[RunReport]


def report(scenario: dict[str, object], runs: Sequence[RunReport]) -> Report:
    """Means over the runs' figures, every run counting the same."""
    wall_s = sum(run.wall_s for run in runs)
    return Report(
        scenario=scenario,
        seeds=[run.seed for run in runs],
        attainment=estimate(run.attainment for run in runs),
        mean_s=estimate(run.mean_s for run in runs),
        p50_s=estimate(run.p50_s for run in runs),
        p90_s=estimate(run.p90_s for run in runs),
        p99_s=estimate(run.p99_s for run in runs),
        mean_threshold=estimate(run.mean_threshold for run in runs),
        mean_token_threshold=estimate(run.mean_token_threshold for run in runs),
        accuracy=estimate(run.accuracy for run in runs),
        utilisation=estimate(run.utilisation for run in runs),
        events_per_s=sum(run.n_events for run in runs) / wall_s if wall_s else 0.0,
        runs=list(runs),
    )


def report_run(run: Run) -> RunReport:
    """The figures of one run."""
    counted = [served for served in run.served if _is_known(served, run)]
    done = [served for served in counted if served.outcome == "done"]
    latencies = sorted(served.latency_s for served in done)
    measured = run.measured
    gaps = sorted(measured.gaps.seconds) if measured.gaps is not None else []
    return RunReport(
        seed=run.seed,
        is_complete=run.is_complete,
        n_requests=len(counted),
        n_done=len(done),
        n_failed=sum(served.outcome == "failed" for served in counted),
        n_refused=sum(served.outcome == "refused" for served in counted),
        attainment=_share(served.in_time for served in counted) or 0.0,
        mean_s=sum(latencies) / len(latencies) if latencies else None,
        p50_s=quantile(latencies, 0.5),
        p90_s=quantile(latencies, 0.9),
        p99_s=quantile(latencies, 0.99),
        percentiles_s=[p for k in range(101) if (p := quantile(latencies, k / 100)) is not None],
        mean_threshold=_ratio(measured.threshold_sum, measured.n_steps),
        mean_token_threshold=_ratio(measured.token_threshold_sum, measured.n_tokens),
        accuracy=_share(served.right for served in done),
        accuracy_in_time=_share(served.right for served in done if served.in_time),
        n_recompute=measured.n_recompute,
        n_cache=measured.n_cache,
        n_rebuilds=measured.n_rebuilds,
        moves=dict(measured.moves),
        n_passes=measured.n_passes,
        rows_per_pass=_ratio(measured.n_rows, measured.n_passes) or 0.0,
        tokens_per_pass=_ratio(measured.n_computed, measured.n_passes) or 0.0,
        gap_s=_ratio(sum(gaps), len(gaps)),
        gap_p99_s=quantile(gaps, 0.99),
        utilisation=run.utilisation,
        virtual_s=run.virtual_s,
        n_events=run.n_events,
        wall_s=run.wall_s,
        slots=_slots(run, counted),
        configurations=list(run.configurations),
        plans=list(run.plans),
    )


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and 95 % confidence of independent values; None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    n, mean = len(known), sum(known) / len(known)
    if n == 1:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in known) / (n - 1)
    t = T_975[n - 2] if n - 2 < len(T_975) else Z_975
    return Estimate(mean, t * math.sqrt(variance / n))


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Of ascending values, linear between the two nearest; None if there are none."""
    if not ordered:
        return None
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _is_known(served: Served, run: Run) -> bool:
    """Whether it ended, or had its time."""
    arrival = served.arrival
    return served.outcome != "unfinished" or arrival.at_s + (arrival.slo_s or 0.0) <= run.virtual_s


def _slots(run: Run, counted: Sequence[Served]) -> list[SlotReport]:
    slot_s, measured = run.measured.slot_s, run.measured.slots
    n_slots = int(run.virtual_s / slot_s) + 1
    arrived, known, in_time = [0] * n_slots, [0] * n_slots, [0] * n_slots
    for served in run.served:
        if served.arrival.at_s <= run.virtual_s:
            arrived[int(served.arrival.at_s / slot_s)] += 1
    for served in counted:
        known[int(served.arrival.at_s / slot_s)] += 1
        in_time[int(served.arrival.at_s / slot_s)] += served.in_time
    reports = []
    for number in range(n_slots):
        slot = measured.get(number)
        reports.append(
            SlotReport(
                at_s=number * slot_s,
                n_arrived=arrived[number],
                n_in_time=in_time[number],
                n_counted=known[number],
                mean_threshold=_ratio(slot.threshold_sum, slot.n_steps) if slot else None,
                busy_s=slot.busy_s if slot else 0.0,
            )
        )
    return reports


def _share(judged: Iterable[bool | None]) -> float | None:
    known = [value for value in judged if value is not None]
    return sum(known) / len(known) if known else None


def _ratio(total: float, n: int) -> float | None:
    return total / n if n else None
