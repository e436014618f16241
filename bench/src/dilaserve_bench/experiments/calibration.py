"""Fits the twin's one constant, and shows what it predicts beside what was published.

All rates and SLOs of the paper's Figure 10 for LLaDA on GSM8K. Figure 10 is the same with ours
among the policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from dilaserve_bench.data import PublishedCurves, gsm8k_curves
from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import crossing, fit_overhead, overhead_of
from dilaserve_bench.experiments.gsm8k import Gsm8k, Point
from dilaserve_bench.experiments.page import Page, Table, interval, number, points
from dilaserve_bench.experiments.plots import colour, panels
from dilaserve_scheduler.policies.habits import interpolate
from dilaserve_scheduler.policies.options import GSM8K_ACCURACY

__all__ = ["EXPERIMENT", "FIGURE_10"]

CROSSED = 0.75
BASELINES = ("infaas", "tediserve", "llumnix")
EVERYBODY = (*BASELINES, "dilaserve")


def run(session: Session) -> Document[Row]:
    """The overhead, fitted unless it is given, and all points with it."""
    bench = Gsm8k(session)
    overhead = session.options.overhead or fit_overhead(bench)
    return _with_overhead(session, bench, "calibration", overhead, BASELINES)


def run_figure_10(session: Session) -> Document[Row]:
    """All points of all policies at the overhead that was fitted before."""
    return _with_overhead(session, Gsm8k(session), "fig10", overhead_of(session), EVERYBODY)


def page(document: Document[Row]) -> Page:
    """Ours, published, and the difference in points."""
    curves = gsm8k_curves()
    rows = [_cells(row, curves) for row in document.rows]
    head = ("policy", "rate", "SLO s", "attainment", "published", "points", "threshold", "p50 s")
    notes = [f"overhead {document.found['overhead']}, seeds {_span(document.seeds)}"]
    for policy, at in document.found["crossed_at"].items():
        ours, theirs = (number(at[whose]) or "no rate" for whose in ("ours", "published"))
        notes.append(f"{policy} falls below {CROSSED:.0%} at {ours} (published: {theirs})")
    notes += _expected_losses(document.rows)
    return Page([Table(head, rows)], notes)


def draw(document: Document[Row]) -> Figure:
    """Attainment by rate and by SLO; dashed as published."""
    curves = gsm8k_curves()
    loosest = curves.slo_multiples[0] * curves.base_slo_s
    figure, (by_rate, by_slo) = panels(["SLO 9.5 s", f"{curves.rates[0]} requests/s and GPU"])
    for policy in dict.fromkeys(row.policy for row in document.rows):
        rows = [row for row in document.rows if row.policy == policy]
        first = [(r.rate, r.attainment) for r in rows if r.slo_s == loosest]
        second = [(r.slo_s, r.attainment) for r in rows if r.rate == curves.rates[0]]
        for axes, line in ((by_rate, first), (by_slo, second)):
            axes.plot(*zip(*sorted(line), strict=True), color=colour(policy), label=policy)
        if (published := curves.systems.get(policy)) is not None:
            slos = [multiple * curves.base_slo_s for multiple in curves.slo_multiples]
            by_rate.plot(curves.rates, published.attainment_by_rate, "--", color=colour(policy))
            by_slo.plot(slos, published.attainment_by_slo, "--", color=colour(policy))
    by_rate.set_xlabel("requests a second and GPU")
    by_slo.set_xlabel("SLO in seconds")
    by_rate.set_ylabel("SLO attainment (dashed: published)")
    by_rate.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="calibration",
    what="fits the step overhead to one published point, and predicts the others with it",
    paper="Figure 10",
    row=Row,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "policies"}),
)
FIGURE_10 = Experiment(
    name="fig10",
    what="attainment by rate and by SLO on GSM8K, ours beside the paper's",
    paper="Figure 10",
    row=Row,
    run=run_figure_10,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "policies"}),
)


def _with_overhead(
    session: Session, bench: Gsm8k, name: str, overhead: float | None, usual: Sequence[str]
) -> Document[Row]:
    curves = gsm8k_curves()
    policies = session.options.policies or usual
    rows: list[Row] = []
    if overhead is not None:
        rows = bench.rows(
            [
                (Point(policy=policy, rate=rate, slo_s=slo_s, overhead=overhead), None)
                for policy in policies
                for rate, slo_s in _points(curves)
            ]
        )
    crossed = {policy: _crossed_at(policy, rows, curves) for policy in policies}
    return session.document(
        name,
        rows,
        n=bench.n_requests,
        published=curves,
        found={
            "overhead": overhead,
            "is_fitted": session.options.overhead is None,
            "crossed_at": crossed,
        },
    )


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


def _cells(row: Row, curves: PublishedCurves) -> list[str]:
    published = _published_at(row, curves)
    return [
        row.policy,
        number(row.rate),
        number(row.slo_s, 2),
        interval(row.attainment, row.ci95),
        number(published),
        points(row.attainment, published),
        number(row.mean_threshold),
        number(row.p50_s, 2),
    ]


def _expected_losses(rows: Sequence[Row]) -> list[str]:
    """Steps were recorded and nothing was answered: what Figure 3 says of such thresholds."""
    full = max(GSM8K_ACCURACY.values())
    most: dict[str, float] = {}
    for row in rows:
        if row.mean_token_threshold is not None:
            lost = 100 * (full - interpolate(GSM8K_ACCURACY, row.mean_token_threshold))
            most[row.policy] = max(most.get(row.policy, 0.0), lost)
    return [
        f"{policy}: by Figure 3, its mean thresholds per token cost up to {lost:.1f} points of "
        "accuracy on GSM8K"
        for policy, lost in most.items()
        if lost > 0
    ]


def _published_at(row: Row, curves: PublishedCurves) -> float | None:
    published = curves.systems.get(row.policy)
    points = _points(curves)
    if published is None or (row.rate, row.slo_s) not in points:
        return None
    values = published.attainment_by_rate + published.attainment_by_slo[1:]
    return values[points.index((row.rate, row.slo_s))]


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds))
