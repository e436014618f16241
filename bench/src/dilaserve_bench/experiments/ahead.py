"""How far ahead of the paper: all policies and fixed thresholds over a range of loads, at one step
overhead, and the same at smaller ones.

A fixed threshold is the frontier that a policy has to beat: attainment against the mean threshold
at one load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import FITTED_OVERHEAD, crossing, overhead_of
from dilaserve_bench.experiments.gsm8k import FIXED, Gsm8k, Point, Wanted
from dilaserve_bench.experiments.page import Page, Table, number
from dilaserve_bench.experiments.plots import colour, panels

__all__ = ["AHEAD", "OVERHEAD", "frontier", "margin"]

RATES = (1.625, 1.687, 1.75, 1.875, 2.1, 2.2, 2.3, 2.4)
"""At the fitted overhead; at another one in proportion to what an instance then does."""
THRESHOLDS = ("fixed-0.5", "fixed-0.6", "fixed-0.7", "fixed-0.8", "fixed-0.9")
POLICIES = ("dilaserve", "tediserve", "proteus", "infaas", "llumnix", *THRESHOLDS)
FADED = {
    "infaas": 1.875,
    "llumnix": 1.875,
    "fixed-0.9": 1.875,
    "proteus": 2.1,
    "tediserve": 2.1,
    "fixed-0.8": 2.1,
    "fixed-0.7": 2.2,
    "fixed-0.6": 2.3,
    "fixed-0.5": 2.3,
}
"""The highest of these rates that is of interest: beyond, they serve far too few in time."""
STRAINED = {"proteus": 1.75, **dict.fromkeys(THRESHOLDS, 1.75)}
"""The lowest of interest: below, those under 0.9 serve everybody, and 0.9 is infaas."""
PROMISED = 0.95
NEARLY_ALL = 0.99
OURS, THEIRS = "dilaserve", "tediserve"
DRAWN_RATES = (1.875, 2.1, 2.2)

OVERHEADS = (1.0, 1.1, 1.25, FITTED_OVERHEAD)
COMPARED = ("infaas", THEIRS, OURS)
COMPARED_RATES = (1.875, 2.2)


def run(session: Session) -> Document[Row]:
    """Every policy at every rate."""
    bench, overhead = Gsm8k(session), overhead_of(session)
    policies = session.options.policies or POLICIES
    rows = bench.rows(_wanted(session.options.rates, policies, overhead))
    return session.document("ahead", rows, n=bench.n_requests, found=_found(rows, overhead))


def run_overheads(session: Session) -> Document[Row]:
    """Some policies at some rates, in proportion to what an instance does, by overhead."""
    bench, options = Gsm8k(session), session.options
    overheads = (options.overhead,) if options.overhead else OVERHEADS
    rows = bench.rows(
        [
            (Point(policy=policy, rate=rate, overhead=overhead), None)
            for overhead in overheads
            for rate in options.rates or _scaled(COMPARED_RATES, overhead)
            for policy in options.policies or COMPARED
        ]
    )
    return session.document("overhead", rows, n=bench.n_requests)


def frontier(rows: Iterable[Row], rate: float) -> list[tuple[float, float]]:
    """(threshold, attainment) of the fixed thresholds at a rate, the lowest first."""
    fixed = [row for row in rows if row.rate == rate and row.policy.startswith(FIXED)]
    return sorted((float(row.policy.removeprefix(FIXED)), row.attainment) for row in fixed)


def margin(fixed: Sequence[tuple[float, float]], row: Row) -> float | None:
    """Attainment above that of the fixed threshold which equals the row's mean threshold, linear
    between two of them; None beyond them."""
    at = row.mean_threshold
    for (low, first), (high, second) in pairwise(fixed):
        if at is not None and low <= at <= high:
            return row.attainment - (first + (second - first) * (at - low) / (high - low))
    return None


def page(document: Document[Row]) -> Page:
    """Attainment / mean threshold, a column for each rate, and what was promised."""
    rates = sorted({row.rate for row in document.rows})
    cells = {(row.policy, row.rate): row for row in document.rows}
    policies = list(dict.fromkeys(row.policy for row in document.rows))
    table = Table(
        ("policy", *(f"{rate:g}" for rate in rates), f"{PROMISED:.0%} up to"),
        [
            [policy, *(_cell(cells.get((policy, rate))) for rate in rates),
             number(document.found["rate_at_95"].get(policy))]
            for policy in policies
        ],
        title="SLO attainment / mean threshold per step, by requests a second and GPU",
    )  # fmt: skip
    return Page([table], _notes(document.found))


def page_overheads(document: Document[Row]) -> Page:
    """One line for each overhead and rate."""
    cells = {(row.overhead, row.rate, row.policy): row for row in document.rows}
    policies = list(dict.fromkeys(row.policy for row in document.rows))
    lines = dict.fromkeys((row.overhead, row.rate) for row in document.rows)
    table = Table(
        ("overhead", "rate", f"rate × overhead / {FITTED_OVERHEAD}", *policies),
        [
            [f"{overhead:g}", f"{rate:g}", f"{rate * overhead / FITTED_OVERHEAD:.3f}",
             *(_cell(cells.get((overhead, rate, policy))) for policy in policies)]
            for overhead, rate in lines
        ],
        title="SLO attainment / mean threshold per step",
    )  # fmt: skip
    return Page([table])


def draw(document: Document[Row]) -> Figure:
    """Attainment by rate, then attainment against mean threshold at some of the rates."""
    rates = sorted({row.rate for row in document.rows})
    drawn = [rate for rate in DRAWN_RATES if rate in rates] or rates[-3:]
    figure, (by_rate, *frontiers) = panels(["all", *(f"{r:g} requests/s and GPU" for r in drawn)])
    policies = [p for p in dict.fromkeys(row.policy for row in document.rows) if FIXED not in p]
    for policy in policies:
        line = sorted((row.rate, row.attainment) for row in document.rows if row.policy == policy)
        by_rate.plot(*zip(*line, strict=True), color=colour(policy), label=policy)
    by_rate.axhline(PROMISED, color="black", linewidth=0.5)
    by_rate.set_xlabel("requests a second and GPU")
    by_rate.set_ylabel("SLO attainment")
    by_rate.legend(fontsize=8)
    for axes, rate in zip(frontiers, drawn, strict=True):
        if fixed := frontier(document.rows, rate):
            axes.plot(*zip(*fixed, strict=True), "o-", color="black", markersize=3, linewidth=1)
        for row in document.rows:
            if row.rate == rate and row.policy in policies and row.mean_threshold is not None:
                axes.plot(row.mean_threshold, row.attainment, "D", color=colour(row.policy))
        axes.set_xlabel("mean threshold per step (line: fixed)")
    return figure


AHEAD = Experiment(
    name="ahead",
    what="all policies and fixed thresholds by load: who keeps the promise, at which threshold",
    paper="",
    row=Row,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "policies", "rates"}),
)
OVERHEAD = Experiment(
    name="overhead",
    what="the same load relative to what the cluster can do, at smaller step overheads",
    paper="",
    row=Row,
    run=run_overheads,
    page=page_overheads,
    takes=frozenset({"overhead", "policies", "rates"}),
)


def _scaled(rates: Iterable[float], overhead: float) -> tuple[float, ...]:
    if overhead == FITTED_OVERHEAD:
        return tuple(rates)
    return tuple(round(rate * FITTED_OVERHEAD / overhead, 3) for rate in rates)


def _wanted(given: Sequence[float], policies: Sequence[str], overhead: float) -> list[Wanted]:
    """Rate by rate."""
    usual = [(rate, rate) for rate in given] or zip(RATES, _scaled(RATES, overhead), strict=True)
    return [
        (Point(policy=policy, rate=rate, overhead=overhead), None)
        for fitted_rate, rate in usual
        for policy in policies
        if given or _is_of_interest(policy, fitted_rate)
    ]


def _is_of_interest(policy: str, rate: float) -> bool:
    return STRAINED.get(policy, rate) <= rate <= FADED.get(policy, rate)


def _found(rows: Sequence[Row], overhead: float) -> dict[str, Any]:
    by_point = {(row.policy, row.rate): row for row in rows}
    rates = sorted({row.rate for row in rows})
    pairs = [(by_point.get((OURS, r)), by_point.get((THEIRS, r)), r) for r in rates]
    return {
        "overhead": overhead,
        **_promised(rows),
        "both_99": [
            {"rate": rate, OURS: ours.mean_threshold, THEIRS: theirs.mean_threshold}
            for ours, theirs, rate in pairs
            if ours and theirs and min(ours.attainment, theirs.attainment) >= NEARLY_ALL
        ],
        "above_fixed": {
            f"{rate:g}": m
            for ours, _, rate in pairs
            if ours and (m := margin(frontier(rows, rate), ours)) is not None
        },
    }


def _promised(rows: Sequence[Row]) -> dict[str, Any]:
    promised = {
        policy: crossing(
            sorted((row.rate, row.attainment) for row in rows if row.policy == policy), PROMISED
        )
        for policy in dict.fromkeys(row.policy for row in rows)
    }
    ours, theirs = promised.get(OURS), promised.get(THEIRS)
    ratio = ours / theirs if ours is not None and theirs is not None else None
    return {"rate_at_95": promised, "ratio": ratio}


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.attainment:.3f} / {number(row.mean_threshold, 2)}"


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [f"Step overhead {found['overhead']:g}."]
    if found["ratio"] is not None:
        notes.append(f"{OURS} promises {found['ratio']:.2f} times the rate of {THEIRS}.")
    notes += [
        f"At {both['rate']:g}, where both reach {NEARLY_ALL:.0%}: mean threshold "
        f"{number(both[OURS])} of {OURS}, {number(both[THEIRS])} of {THEIRS}."
        for both in found["both_99"]
    ]
    notes += [
        f"At {rate} {OURS} is {100 * above:+.1f} points from the fixed threshold that equals its "
        "mean."
        for rate, above in found["above_fixed"].items()
    ]
    return notes
