"""A report as lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from dilaserve_bench.twin.report import Estimate, Report, RunReport

__all__ = ["as_lines"]


def as_lines(report: Report) -> list[str]:
    """Means over seeds with the half-width of their 95 % confidence interval, and totals."""
    runs = report.runs
    latencies = (report.p50_s, report.p90_s, report.p99_s)
    thresholds = (report.mean_threshold, report.mean_token_threshold)
    rows = [
        ("SLO attainment", _percent(report.attainment)),
        ("latency p50 · p90 · p99", " · ".join(_number(each, 2) for each in latencies) + " s"),
        ("mean threshold by step · by token", " · ".join(_number(t, 4) for t in thresholds)),
        ("accuracy", _percent(report.accuracy)),
        ("utilisation", _percent(report.utilisation)),
        ("served", _total(runs, lambda run: run.n_done)),
        ("failed", _total(runs, lambda run: run.n_failed)),
        ("refused", _total(runs, lambda run: run.n_refused)),
        ("recompute steps", _total(runs, lambda run: run.n_recompute)),
        ("cache steps", _total(runs, lambda run: run.n_cache)),
        ("rebuilds", _total(runs, lambda run: run.n_rebuilds)),
        ("changes of owner", _moves(runs)),
        ("plans", _plans(runs)),
        ("instances at last", _at_last(runs)),
        ("events a second", f"{report.events_per_s:,.0f}"),
    ]
    seeds = f"{report.scenario.get('policy')}, seeds {', '.join(map(str, report.seeds)) or 'none'}"
    broken_off = ", ".join(str(run.seed) for run in runs if not run.is_complete)
    return [
        seeds + (f" (seed {broken_off} was broken off)" if broken_off else ""),
        *(f"  {name:<35}{value}" for name, value in rows if value),
    ]


def _percent(value: Estimate | None) -> str:
    if value is None:
        return ""
    spread = f" ± {100 * value.ci95:.1f}" if value.ci95 is not None else ""
    return f"{100 * value.mean:.1f}{spread} %"


def _number(value: Estimate | None, digits: int) -> str:
    if value is None:
        return "-"
    spread = f" ± {value.ci95:.{digits}f}" if value.ci95 is not None else ""
    return f"{value.mean:.{digits}f}{spread}"


def _total(runs: Sequence[RunReport], count: Callable[[RunReport], int]) -> str:
    total = sum(map(count, runs))
    return f"{total:,}" if total else ""


def _plans(runs: Sequence[RunReport]) -> str:
    verdicts = Counter(plan.verdict for run in runs for plan in run.plans)
    return ", ".join(f"{verdict} {n:,}" for verdict, n in verdicts.most_common())


def _at_last(runs: Sequence[RunReport]) -> str:
    """In each run, of which degree."""
    lasts = (run.configurations[-1].serving for run in runs if run.configurations)
    return "; ".join(" + ".join(f"{n}×TP-{d}" for d, n in last.items()) for last in lasts)


def _moves(runs: Sequence[RunReport]) -> str:
    moves: Counter[str] = Counter()
    for run in runs:
        moves.update(run.moves)
    return ", ".join(f"{cause} {n:,}" for cause, n in moves.most_common())
