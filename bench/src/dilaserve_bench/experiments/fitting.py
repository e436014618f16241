"""Finds where curves reach a level, and the one constant of the twin: the step overhead.

The overhead is fitted so that INFaaS attains what it did at one of the five published rates. It
stands for what a system spends outside of the profiled pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from dilaserve_bench.data import gsm8k_curves
from dilaserve_bench.experiments.experiment import Session
from dilaserve_bench.experiments.gsm8k import Gsm8k, Point

__all__ = ["FITTED_OVERHEAD", "crossing", "fit_overhead", "overhead_of", "solve"]

FITTED_OVERHEAD = 1.595
"""What `dilaserve experiment calibration` finds."""
FITTED_POLICY = "infaas"
FITTED_RATE = 1.687
OVERHEADS = (1.0, 2.5)
TOLERANCE = 0.004
"""Of the attainment: five requests of 1,319."""
FAR = 64.0
DIGITS = 3


def overhead_of(session: Session) -> float:
    """The given one, else the fitted."""
    return session.options.overhead or FITTED_OVERHEAD


def fit_overhead(bench: Gsm8k) -> float | None:
    """The overhead with which INFaaS attains what was published at FITTED_RATE; None if it was
    interrupted."""
    curves = gsm8k_curves()
    target = curves.systems[FITTED_POLICY].attainment_by_rate[curves.rates.index(FITTED_RATE)]

    def excess(overhead: float) -> float | None:
        row = bench.row(Point(policy=FITTED_POLICY, rate=FITTED_RATE, overhead=overhead))
        return None if row is None else row.attainment - target

    fitted = solve(excess, *OVERHEADS, tolerance=TOLERANCE)
    return None if fitted is None else round(fitted, DIGITS)


def solve(
    f: Callable[[float], float | None], low: float, high: float, *, tolerance: float
) -> float | None:
    """Where a falling function is 0, within `tolerance` of its value, by regula falsi (Illinois).
    `high` is moved on until `f` is not above 0 there. None when `f` gives None; ValueError when
    `f` is below 0 at `low`, or nowhere near."""
    f_low, f_high = f(low), f(high)
    while f_high is not None and f_high > 0 and high < FAR * low:
        high *= 2
        f_high = f(high)
    if f_low is None or f_high is None:
        return None
    if not f_low >= 0 >= f_high:
        raise ValueError(f"no zero between {low} ({f_low:+.3f}) and {high} ({f_high:+.3f})")
    side = 0
    while True:
        x = (low * f_high - high * f_low) / (f_high - f_low)
        value = f(x)
        if value is None or abs(value) <= tolerance or high - low < 1e-6:
            return None if value is None else x
        if value > 0:
            low, f_low = x, value
            f_high = f_high / 2 if side > 0 else f_high
            side = 1
        else:
            high, f_high = x, value
            f_low = f_low / 2 if side < 0 else f_low
            side = -1


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Where a falling curve through (x, y) first crosses `level`, linear between its points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= level > y1:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None
