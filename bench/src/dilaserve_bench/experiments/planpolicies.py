"""Plan policies of the engines side by side, on long prompts: what recompute steps of some requests
do to the cache steps of the others, in mean and tail.

Every plan policy gets the same arrivals and the same recorded steps, under a scheduling policy that
limits recomputing rows (dilaserve) and one that does not (infaas).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import overhead_of
from dilaserve_bench.experiments.gsm8k import N_PROMPT, Gsm8k, Point
from dilaserve_bench.experiments.page import Page, Table, interval, number
from dilaserve_bench.twin.report import RunReport, estimate

__all__ = ["EXPERIMENT", "PLANS", "PlanRow"]

PLANS: Mapping[str, Mapping[str, Any]] = {
    "blockserve": {},
    "sangam, 512": {"plan_policy": "sangam", "plan_tokens": 512},
    "sangam, 1280": {"plan_policy": "sangam", "plan_tokens": 1280},
    "sangam, 1536": {"plan_policy": "sangam", "plan_tokens": 1536},
    "static": {"plan_policy": "static"},
}
"""By name, as in Point; a number is sangam's tokens of a pass."""
LONG_PROMPT = 1792
"""Four requests with their outputs fill an instance; of GSM8K's, six."""
RATES: Mapping[int, Sequence[float]] = {N_PROMPT: (1.687,), LONG_PROMPT: (0.8, 0.95, 1.1)}
"""Arrivals a second and GPU, by the length of the prompt."""
POLICIES = ("infaas", "dilaserve")
N_REQUESTS = 600
SECOND_MS = 1000.0


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One plan policy under one scheduling policy: means over seeds."""

    policy: str
    plan_policy: str
    """A key of PLANS."""
    n_prompt: int
    rate: float
    """Arrivals a second, per GPU."""
    attainment: float
    ci95: float | None
    """Of the attainment."""
    mean_threshold: float | None
    mean_s: float
    """Of a request, like p99_s."""
    p99_s: float
    gap_ms: float
    """Pause before a cache step, like gap_p99_ms."""
    gap_p99_ms: float
    rows_per_pass: float
    tokens_per_pass: float


def run(session: Session) -> Document[PlanRow]:
    """All plan policies at every length and rate."""
    bench, overhead = Gsm8k(session, n_requests=N_REQUESTS), overhead_of(session)
    points = [
        (name, _point(policy, name, n_prompt, rate, overhead))
        for n_prompt, rates in RATES.items()
        for rate in session.options.rates or rates
        for policy in session.options.policies or POLICIES
        for name in PLANS
    ]
    session.watch.expect(len(points) * len(session.seeds))
    rows = [_row(name, point, bench.runs(point)) for name, point in points]
    return session.document(
        "planpolicies",
        [row for row in rows if row is not None],
        n=bench.n_requests,
        found={"overhead": overhead},
    )


def page(document: Document[PlanRow]) -> Page:
    """A table for each length of the prompt."""
    head = (
        *("policy", "rate", "plan policy", "attainment", "threshold", "mean s", "p99 s"),
        *("pause ms", "p99 ms", "rows", "tokens"),
    )
    tables = [
        Table(
            head,
            [_cells(row) for row in document.rows if row.n_prompt == n_prompt],
            title=f"Prompts of {n_prompt:,} tokens",
        )
        for n_prompt in dict.fromkeys(row.n_prompt for row in document.rows)
    ]
    return Page(
        tables,
        [
            f"Step overhead {document.found['overhead']:g}.",
            "Pause: before a cache step, from the end of the request's step before; rows and "
            "tokens: of a pass. A number behind sangam: tokens that a pass has on average.",
            "static, as instances run it: who ends leaves the batch at once, its place stays "
            "empty.",
        ],
    )


EXPERIMENT = Experiment(
    name="planpolicies",
    what="plan policies of the engine: latencies, and pauses of cache steps, on long prompts",
    paper="",
    row=PlanRow,
    run=run,
    page=page,
    takes=frozenset({"overhead", "policies", "rates"}),
    n_seeds=3,
)


def _point(policy: str, name: str, n_prompt: int, rate: float, overhead: float) -> Point:
    return Point(
        policy=policy,
        rate=rate,
        overhead=overhead,
        n_prompt=n_prompt,
        time_gaps=True,
        **PLANS[name],
    )


def _row(name: str, point: Point, runs: Sequence[RunReport]) -> PlanRow | None:
    """None if it was interrupted before the first seed."""
    attainment = estimate(run.attainment for run in runs)
    if attainment is None:
        return None
    thresholds = estimate(run.mean_threshold for run in runs)
    return PlanRow(
        policy=point.policy,
        plan_policy=name,
        n_prompt=point.n_prompt,
        rate=point.rate,
        attainment=round(attainment.mean, DIGITS),
        ci95=None if attainment.ci95 is None else round(attainment.ci95, DIGITS),
        mean_threshold=None if thresholds is None else round(thresholds.mean, DIGITS),
        mean_s=_mean(run.mean_s for run in runs),
        p99_s=_mean(run.p99_s for run in runs),
        gap_ms=_mean((run.gap_s for run in runs), SECOND_MS),
        gap_p99_ms=_mean((run.gap_p99_s for run in runs), SECOND_MS),
        rows_per_pass=_mean(run.rows_per_pass for run in runs),
        tokens_per_pass=_mean(run.tokens_per_pass for run in runs),
    )


def _mean(values: Iterable[float | None], unit: float = 1.0) -> float:
    """0 where nobody was served."""
    found = estimate(values)
    return 0.0 if found is None else round(unit * found.mean, DIGITS)


def _cells(row: PlanRow) -> list[str]:
    return [
        row.policy,
        f"{row.rate:g}",
        row.plan_policy,
        interval(row.attainment, row.ci95),
        number(row.mean_threshold),
        number(row.mean_s, 2),
        number(row.p99_s, 2),
        number(row.gap_ms, 1),
        number(row.gap_p99_ms, 1),
        number(row.rows_per_pass, 2),
        number(row.tokens_per_pass, 0),
    ]
