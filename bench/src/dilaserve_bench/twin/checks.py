"""Whether what `dilaserve simulate` was told can be simulated: the ranges of its numbers, and where
the plot is to go, so that a run of minutes does not end with nothing. Knows no files' contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dilaserve.errors import DiLaServeError

if TYPE_CHECKING:
    from dilaserve_bench.twin.options import SimulateOptions

__all__ = [
    "LARGEST_OVERHEAD",
    "MOST_REQUESTS",
    "PLOTS",
    "check_file",
    "check_options",
    "check_plot",
]

PLOTS = (".svg", ".png", ".pdf")
WORST_WMAPE = 10.0
"""Errors are drawn in logarithms, which a larger one would take beyond any number."""
HUGE = 1e9
"""Stands for any number, but not for infinity."""

MOST_TOKENS = 1e6
"""Of a prompt or an output: every virtual request has a canvas."""
MOST_REQUESTS = 1e7
LARGEST_OVERHEAD = 1000.0

_Range = tuple[str, float | None, float, float, bool, str]
"""Option, value (None: not given), least, most, whether the least is excluded, an example."""


def check_options(options: SimulateOptions) -> None:
    """Raises DiLaServeError for the first number that is out of its range."""
    for name, value, least, most, is_open, example in _ranges(options):
        if value is None or (least <= value <= most and not (is_open and value == least)):
            continue
        rule = f"above {least:g}" if is_open else f"from {least:g}"
        raise DiLaServeError(
            f"--{name} {value} is not {rule} to {most:g}; write for example {example}"
        )


def _ranges(options: SimulateOptions) -> Iterator[_Range]:
    yield "threshold", options.threshold, 0.0, 1.0, False, "0.9"
    yield "budget", options.budget, 1, HUGE, False, "8192"
    yield "plan-tokens", options.plan_tokens, 1, HUGE, False, "1280"
    yield "overhead", options.overhead, 0.0, LARGEST_OVERHEAD, True, "1.5"
    yield "rate", options.rate, 0.0, HUGE, True, "1.5"
    yield "speed", options.speed, 0.0, HUGE, True, "2"
    yield "requests", options.requests, 1, MOST_REQUESTS, False, "1319"
    yield "prompt", options.prompt, 1, MOST_TOKENS, False, "1075"
    yield "output", options.output, 1, MOST_TOKENS, False, "256"
    yield "slo", options.slo_s, 0.0, HUGE, True, "9.5"
    yield "problems", options.problems, 1, HUGE, False, "64"
    yield "run-ahead", options.run_ahead, 1, HUGE, False, "1"
    yield "horizon", options.horizon_s, 0.0, math.inf, True, "600"
    yield "replan-every", options.replan_every_s, 0.0, HUGE, True, "300"
    yield "min-gain", options.min_gain, 0.0, HUGE, False, "0.1"
    yield "predictor-error", options.predictor_error, -math.inf, WORST_WMAPE, False, "0.193"


def check_plot(path: Path) -> None:
    """Raises DiLaServeError for what is no plot's file, or lies nowhere."""
    if path.suffix not in PLOTS:
        raise DiLaServeError(f"--plot {path}: give a file that ends in {', '.join(PLOTS)}")
    check_file(path, "--plot")


def check_file(path: Path, option: str) -> None:
    """Raises DiLaServeError for a file that could not be written. Writes nothing."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DiLaServeError(f"{option} {path}: there is no folder {path.parent}; create it")
    if path.is_dir():
        raise DiLaServeError(f"{option} {path} is a folder; give a file in it")
