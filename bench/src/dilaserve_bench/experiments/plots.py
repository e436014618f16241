"""What all plots of experiments share: size, colours, and the same file for the same figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "colour", "panels", "save"]

WIDTH, HEIGHT = 4.6, 3.4
COLOURS = {
    "dilaserve": "#d62728",
    "tediserve": "#1f77b4",
    "infaas": "#7f7f7f",
    "llumnix": "#8c564b",
    "proteus": "#2ca02c",
}
OTHERS = ("#9467bd", "#ff7f0e", "#17becf", "#bcbd22", "#e377c2")


def panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with one panel beside the other."""
    figure = Figure(figsize=(WIDTH * len(titles), HEIGHT), layout="constrained")
    axes = [figure.add_subplot(1, len(titles), number + 1) for number in range(len(titles))]
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, fontsize=10)
        each.grid(alpha=0.3)
    return figure, axes


def colour(policy: str, number: int = 0) -> str:
    """The same for a policy in every plot."""
    return COLOURS.get(policy, OTHERS[number % len(OTHERS)])


def save(figure: Figure, path: Path) -> None:
    """The same figure gives the same file."""
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "dilaserve", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata=metadata)
