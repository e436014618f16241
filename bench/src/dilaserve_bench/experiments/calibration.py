"""Fits the twin's one constant, and shows what it predicts beside what was published.

    python -m dilaserve_bench.experiments.calibration
    python -m dilaserve_bench.experiments.calibration --quick --json

The step overhead is fitted so that INFaaS attains what it did at one of the five published rates;
everything else is a prediction. It stands for what a system spends outside of the profiled pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
from rich.console import Console

from dilaserve_bench.data import PublishedCurves, gsm8k_curves
from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.gsm8k import N_REQUESTS, Gsm8k
from dilaserve_bench.twin.runner import watching

__all__ = ["as_lines", "calibrate", "crossing", "fit_overhead", "solve"]

FITTED_POLICY = "infaas"
FITTED_RATE = 1.687
OVERHEADS = (1.0, 2.5)
TOLERANCE = 0.004
"""Of the attainment: five requests of 1,319."""
FAR = 64.0
CROSSED = 0.75
SEEDS = 8
QUICK_SEEDS = 2
QUICK_REQUESTS = 150


def calibrate(bench: Gsm8k, policies: Sequence[str], *, overhead: float | None = None) -> Document:
    """The whole experiment, or what there is of it when it is interrupted. A given `overhead` is
    taken instead of a fitted one."""
    curves = gsm8k_curves()
    fitted = overhead if overhead is not None else fit_overhead(bench, curves)
    rows: list[Row] = []
    if fitted is not None:
        rows = [
            row
            for policy in policies
            for rate, slo_s in _points(curves)
            if (row := bench.row(policy, rate, overhead=fitted, slo_s=slo_s)) is not None
        ]
    return Document(
        name="calibration",
        seeds=bench.seeds,
        n=bench.n_requests,
        rows=rows,
        published=msgspec.to_builtins(curves),
        found={
            "overhead": fitted,
            "is_fitted": overhead is None,
            "crossed_at": {policy: _crossed_at(policy, rows, curves) for policy in policies},
        },
        is_quick=bench.n_requests < N_REQUESTS,
        is_complete=not bench.watch.is_stopped,
    )


def fit_overhead(bench: Gsm8k, curves: PublishedCurves) -> float | None:
    """The overhead with which INFaaS attains what was published at FITTED_RATE."""
    published = curves.systems[FITTED_POLICY].attainment_by_rate
    target = published[curves.rates.index(FITTED_RATE)]

    def excess(overhead: float) -> float | None:
        row = bench.row(FITTED_POLICY, FITTED_RATE, overhead=overhead)
        return None if row is None else row.attainment - target

    return solve(excess, *OVERHEADS, tolerance=TOLERANCE)


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


def _points(curves: PublishedCurves) -> list[tuple[float, float]]:
    """(rate, SLO): all rates at the loosest SLO, then the other SLOs at the lowest rate."""
    loosest, *others = (multiple * curves.base_slo_s for multiple in curves.slo_multiples)
    by_rate = [(rate, loosest) for rate in curves.rates]
    return by_rate + [(curves.rates[0], slo_s) for slo_s in others]


def _crossed_at(
    policy: str, rows: Sequence[Row], curves: PublishedCurves
) -> dict[str, float | None]:
    slo_s = curves.slo_multiples[0] * curves.base_slo_s
    ours = [
        (row.rate, row.attainment) for row in rows if (row.policy, row.slo_s) == (policy, slo_s)
    ]
    published = curves.systems.get(policy)
    theirs = zip(curves.rates, published.attainment_by_rate, strict=True) if published else ()
    return {
        "ours": crossing(sorted(ours), CROSSED),
        "published": crossing(list(theirs), CROSSED),
    }


def _published_at(row: Row, curves: PublishedCurves) -> float | None:
    published = curves.systems.get(row.policy)
    points = _points(curves)
    if published is None or (row.rate, row.slo_s) not in points:
        return None
    values = published.attainment_by_rate + published.attainment_by_slo[1:]
    return values[points.index((row.rate, row.slo_s))]


def as_lines(document: Document) -> list[str]:
    """For people: ours, published, and the difference in points."""
    curves = gsm8k_curves()
    found = document.found
    lines = ["QUICK: this tries the plumbing and shows nothing"] if document.is_quick else []
    lines.append(f"overhead {found['overhead']}, seeds {document.seeds}, n {document.n}")
    lines.append(
        f"{'policy':<12}{'rate':>7}{'SLO s':>7}{'ours':>8}{'±':>7}{'published':>11}{'':>8}"
    )
    for row in document.rows:
        published = _published_at(row, curves)
        beside = (
            f"{published:>11.3f}{100 * (row.attainment - published):>+8.1f}" if published else ""
        )
        lines.append(
            f"{row.policy:<12}{row.rate:>7.3f}{row.slo_s:>7.2f}{row.attainment:>8.3f}"
            f"{row.ci95 or 0.0:>7.3f}{beside}"
        )
    for policy, at in found["crossed_at"].items():
        lines.append(
            f"{policy} crosses {CROSSED:.0%}: ours {at['ours']}, published {at['published']}"
        )
    return lines


def main() -> None:
    """Command line."""
    args = _arguments()
    n_seeds, n_requests = args.seeds or SEEDS, N_REQUESTS
    if args.quick:
        n_seeds, n_requests = args.seeds or QUICK_SEEDS, QUICK_REQUESTS
    with watching(Console(file=sys.stderr)) as watch:
        bench = Gsm8k(
            range(n_seeds),
            watch=watch,
            timer=time.perf_counter,
            n_requests=n_requests,
            run_ahead=args.run_ahead,
        )
        document = calibrate(bench, args.policies.split(","), overhead=args.overhead)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
    else:
        print("\n".join(as_lines(document)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=FITTED_POLICY, help="separated by commas")
    parser.add_argument("--seeds", type=int, help=f"how many; default {SEEDS}")
    parser.add_argument("--overhead", type=float, help="taken as it is instead of fitted")
    parser.add_argument("--run-ahead", type=int, help="steps; default: to the end of the block")
    parser.add_argument("--quick", action="store_true", help="small runs that show nothing")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
