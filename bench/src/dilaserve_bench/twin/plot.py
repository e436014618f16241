"""One page of plots of a report: load, attainment and thresholds over time, and latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilaserve_bench.twin.report import Report, RunReport, SlotReport

__all__ = ["draw", "save_plot"]

MINUTE_S = 60.0
SHORT_S = 600.0
"""Runs up to this long are drawn in seconds."""


def save_plot(report: Report, path: Path) -> None:
    """Draw it into a file, whose ending says the format: png, svg or pdf."""
    draw(report).savefig(path, dpi=120)


def draw(report: Report) -> Figure:
    """Lines over time are those of the first run; latencies those of all."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    (load, attainment), (threshold, latency) = figure.subplots(2, 2)
    slots = report.runs[0].slots if report.runs else []
    width_s = slots[1].at_s if len(slots) > 1 else MINUTE_S
    _over_time(load, slots, "arrivals a second", lambda slot: slot.n_arrived / width_s)
    if report.runs and report.runs[0].configurations:
        _instances(load, report.runs[0], 1.0 if _is_short(slots) else MINUTE_S)
    _over_time(attainment, slots, "SLO attainment", _attained)
    attainment.set_ylim(0, 1.02)
    _over_time(threshold, slots, "mean threshold over steps", lambda slot: slot.mean_threshold)
    threshold.set_ylim(0.4, 1.0)
    _latencies(latency, report)
    figure.suptitle(_title(report))
    return figure


def _over_time(
    axes: Axes, slots: Sequence[SlotReport], label: str, value: Callable[[SlotReport], float | None]
) -> None:
    is_short = _is_short(slots)
    unit_s = 1.0 if is_short else MINUTE_S
    points = [(slot.at_s / unit_s, v) for slot in slots if (v := value(slot)) is not None]
    axes.step([x for x, _ in points], [y for _, y in points], where="post")
    axes.set_xlabel("seconds" if is_short else "minutes")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _is_short(slots: Sequence[SlotReport]) -> bool:
    return not slots or slots[-1].at_s <= SHORT_S


def _instances(axes: Axes, run: RunReport, unit_s: float) -> None:
    """How many serve, by degree, on an axis of their own."""
    course = run.configurations
    beside = axes.twinx()
    times = [each.at_s / unit_s for each in course] + [run.virtual_s / unit_s]
    for degree in sorted({degree for each in course for degree in each.serving}):
        counts = [each.serving.get(degree, 0) for each in course]
        beside.step(times, [*counts, counts[-1]], "--", where="post", label=f"TP-{degree}")
    beside.set_ylabel("instances (dashed)")
    beside.legend(fontsize=8)


def _attained(slot: SlotReport) -> float | None:
    return slot.n_in_time / slot.n_counted if slot.n_counted else None


def _latencies(axes: Axes, report: Report) -> None:
    for run in report.runs:
        axes.plot(run.percentiles_s, [k / 100 for k in range(len(run.percentiles_s))], alpha=0.7)
    slo_s = report.scenario.get("slo_s")
    if isinstance(slo_s, (int, float)):
        axes.axvline(slo_s, color="black", linestyle="--", linewidth=1, label=f"SLO {slo_s:g} s")
        axes.legend()
    axes.set_xlabel("latency in seconds")
    axes.set_ylabel("share of requests served")
    axes.grid(alpha=0.3)


def _title(report: Report) -> str:
    policy, attainment = report.scenario.get("policy"), report.attainment
    if attainment is None:
        return f"{policy}: nothing was run"
    spread = f" ± {100 * attainment.ci95:.1f}" if attainment.ci95 is not None else ""
    return f"{policy}: attainment {100 * attainment.mean:.1f}{spread} %, seeds {report.seeds}"
