"""One page of plots of what a live gateway served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilaserve_bench.live.serve import Served

__all__ = ["draw", "save_plot"]


def save_plot(served: Sequence[Served], path: Path) -> None:
    """Draw it into a file, whose ending says the format: png, svg or pdf."""
    draw(served).savefig(path, dpi=120)


def draw(served: Sequence[Served]) -> Figure:
    """Latencies of each load as shares of its requests, and all loads by their rate."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    (first, latency), (attainment, throughput) = figure.subplots(2, 2)
    for each in served:
        done = [answer for answer in each.answers if answer.outcome == "done"]
        label = f"{each.row.load}, {each.row.rate:.3g} a second"
        starts = [a.first_at - a.due_at for a in done if a.first_at is not None]
        _shares(first, starts, each.row.n, label)
        _shares(latency, [answer.latency_s for answer in done], each.row.n, label)
    for slo_s in {each.slo_s for each in served if each.slo_s is not None}:
        latency.axvline(slo_s, color="black", linestyle="--", linewidth=1)
    first.set_xlabel("seconds to the first text")
    latency.set_xlabel("seconds to the end")
    latency.legend(fontsize="small")
    _by_rate(attainment, served)
    _throughput(throughput, served)
    return figure


def _shares(axes: Axes, seconds: Sequence[float], n: int, label: str) -> None:
    """A curve that ends below 1 where some were not served."""
    ordered = sorted(seconds)
    axes.step(ordered, [(k + 1) / n for k in range(len(ordered))], where="post", label=label)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)


def _by_rate(axes: Axes, served: Sequence[Served]) -> None:
    rows = sorted((each.row for each in served), key=lambda row: row.rate)
    axes.plot([r.rate for r in rows], [r.attainment for r in rows], "o-", label="SLO attainment")
    known = [(row.rate, row.mean_threshold) for row in rows if row.mean_threshold is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "s--", label="mean threshold")
    axes.set_xlabel("arrivals a second")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()


def _throughput(axes: Axes, served: Sequence[Served]) -> None:
    rows = sorted((each.row for each in served), key=lambda row: row.rate)
    axes.plot([row.rate for row in rows], [row.requests_per_s for row in rows], "o-")
    axes.set_xlabel("arrivals a second")
    axes.set_ylabel("requests served a second")
    axes.set_ylim(0, 1.1 * max(row.requests_per_s for row in rows) or 1.0)
    axes.grid(alpha=0.3)
