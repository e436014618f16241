"""Threshold control taken apart (the paper's Figure 11): deadlines alone, load alone, both; then
each of our differences to the paper left out, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from matplotlib.figure import Figure

from dilaserve_bench.data.ablations import ablations
from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import overhead_of
from dilaserve_bench.experiments.gsm8k import Gsm8k, Point
from dilaserve_bench.experiments.page import Page, Table, number
from dilaserve_bench.experiments.plots import OTHERS, panels
from dilaserve_scheduler.policies import PolicyOptions

__all__ = ["ABLATION", "CONTROL", "FIGURE_11", "without_each"]

CONTROL: Mapping[str, Mapping[str, Any]] = {
    "neither": {"load_control": False, "deadline_control": False},
    "SLO-aware": {"load_control": False},
    "load control": {"deadline_control": False},
    "both": {},
}
NEEDS_DEGREES = "all_candidates"
"""With one degree there is nothing to choose from: left out on a mix of them."""
MIXED = "8xtp1,2xtp4"
WITH_DEGREES: Mapping[str, Mapping[str, Any]] = {
    f"both, {MIXED}": {},
    f"without all candidates, {MIXED}": {NEEDS_DEGREES: False},
}
RATES = (1.75, 1.875, 2.2)
MIXED_RATES = (1.25,)
WITHOUT_RATES = (1.875, 2.2)
POINT = 0.01


def run(session: Session) -> Document[Row]:
    """Of dilaserve: control at all rates, everything else at two of them."""
    rows = _control(session, "dilaserve", RATES)
    rows += _measured(session, "dilaserve", without_each(), session.options.rates or WITHOUT_RATES)
    mixed = session.options.rates or MIXED_RATES
    rows += _measured(session, "dilaserve", WITH_DEGREES, mixed, instances=MIXED)
    return _document(session, "ablation", rows, published=None)


def without_each() -> dict[str, dict[str, Any]]:
    """Every part of dilaserve that can be left out, but the two controls."""
    controls = {part for variant in CONTROL.values() for part in variant}
    parts = [field.name for field in fields(PolicyOptions) if field.default is True]
    return {
        f"without {part.replace('_', ' ')}": {part: False}
        for part in parts
        if part not in controls and part != NEEDS_DEGREES
    }


def run_figure_11(session: Session) -> Document[Row]:
    """Of tediserve, the paper's own."""
    rows = _control(session, "tediserve", RATES)
    return _document(session, "fig11", rows, published=ablations().threshold_control)


def page(document: Document[Row]) -> Page:
    """Attainment / mean threshold by rate; the published below."""
    rates = sorted({row.rate for row in document.rows})
    cells = {(row.policy, row.rate): row for row in document.rows}
    names = list(dict.fromkeys(row.policy for row in document.rows))
    ours = Table(
        ("", *(f"{rate:g}" for rate in rates)),
        [[name, *(_cell(cells.get((name, rate))) for rate in rates)] for name in names],
        title="SLO attainment / mean threshold per step, by requests a second and GPU",
    )
    tables = [ours, *([_published_table()] if document.published else [])]
    return Page(tables, _notes(document))


def draw(document: Document[Row]) -> Figure:
    """Attainment and mean threshold by rate, of those that have more than two rates."""
    figure, (attainment, threshold) = panels(["SLO attainment", "mean threshold per step"])
    for number_, name in enumerate(CONTROL):
        rows = sorted((r for r in document.rows if r.policy == name), key=lambda row: row.rate)
        rates = [row.rate for row in rows]
        style = OTHERS[number_]
        attainment.plot(rates, [r.attainment for r in rows], "o-", color=style, label=name)
        thresholds = [(r.rate, r.mean_threshold) for r in rows if r.mean_threshold is not None]
        if thresholds:
            threshold.plot(*zip(*thresholds, strict=True), "o-", color=style)
    for axes in (attainment, threshold):
        axes.set_xlabel("requests a second and GPU")
    attainment.legend(fontsize=8)
    return figure


ABLATION = Experiment(
    name="ablation",
    what="dilaserve without deadline control, load control, and each of its other parts",
    paper="Figure 11",
    row=Row,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "rates"}),
)
FIGURE_11 = Experiment(
    name="fig11",
    what="tediserve without deadline control and load control, beside the paper's",
    paper="Figure 11",
    row=Row,
    run=run_figure_11,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "rates"}),
)


def _control(session: Session, policy: str, rates: Sequence[float]) -> list[Row]:
    return _measured(session, policy, CONTROL, session.options.rates or rates)


def _measured(
    session: Session,
    policy: str,
    variants: Mapping[str, Mapping[str, Any]],
    rates: Sequence[float],
    instances: str = "16xtp1",
) -> list[Row]:
    """A row for each variant and rate, under the variant's name."""
    overhead = overhead_of(session)
    return Gsm8k(session).rows(
        [
            (
                Point(
                    policy=policy,
                    rate=rate,
                    overhead=overhead,
                    parts=dict(parts),
                    instances=instances,
                ),
                name,
            )
            for name, parts in variants.items()
            for rate in rates
        ]
    )


def _document(session: Session, name: str, rows: list[Row], *, published: object) -> Document[Row]:
    return session.document(
        name,
        rows,
        n=Gsm8k(session).n_requests,
        published=published,
        found={"overhead": overhead_of(session), "both_against_each": _against(rows)},
    )


def _against(rows: Sequence[Row]) -> dict[str, float]:
    """By rate: attainment of both less the better of either alone."""
    cells = {(row.policy, row.rate): row.attainment for row in rows}
    return {
        f"{rate:g}": round(cells["both", rate] - max(alone), 6)
        for rate in sorted({row.rate for row in rows})
        if ("both", rate) in cells
        and (
            alone := [
                cells[name, rate] for name in ("SLO-aware", "load control") if (name, rate) in cells
            ]
        )
    }


def _notes(document: Document[Row]) -> list[str]:
    against = document.found["both_against_each"]
    notes = [f"Step overhead {document.found['overhead']:g}."]
    notes += [
        f"At {rate} both together are {100 * points:+.1f} points from the better of either alone."
        for rate, points in against.items()
    ]
    worse = [rate for rate, points in against.items() if points < -POINT]
    return [*notes, f"Worse than either by more than a point at: {', '.join(worse) or 'no rate'}."]


def _published_table() -> Table:
    theirs = ablations().threshold_control
    rows = [
        [name, *(f"{a:.3f} / {t:.2f}" for a, t in zip(line, thresholds, strict=True))]
        for name, line in theirs.attainment.items()
        for thresholds in [theirs.mean_threshold[name]]
    ]
    head = ("", *(f"{rate:g}" for rate in theirs.rates))
    return Table(head, rows, title=f"Published ({theirs.machine})")


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.attainment:.3f} / {number(row.mean_threshold, 2)}"
