"""Migration at cache steps, too (the paper's Table 6): what a move costs where the cache has to be
rebuilt for it.

The same rule of the least loaded instance, asked after every pass, and asked only where a block
begins. The published figures are of another machine and load, and are for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dilaserve.messages import StepResult
from dilaserve_bench.data.ablations import ablations
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import overhead_of
from dilaserve_bench.experiments.gsm8k import Gsm8k, Point
from dilaserve_bench.experiments.page import Page, Table, number
from dilaserve_bench.twin.report import RunReport, estimate
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Decision, Move
from dilaserve_scheduler.policies import POLICIES, PolicyOptions
from dilaserve_scheduler.policies.fastest import tp_degree
from dilaserve_scheduler.policies.infaas import Infaas
from dilaserve_scheduler.policies.llumnix import faster_elsewhere
from dilaserve_scheduler.policies.pricing import Pricing

__all__ = ["TABLE_6", "MigrationRow", "MovesAnytime"]

INSTANCES = (1, 2, 3, 4)
RATE = 1.5
ANYTIME, AT_BLOCKS, NEVER = "moves-anytime", "llumnix", "infaas"


class MovesAnytime(Infaas):
    """Llumnix that moves requests in the middle of a block, too, for the price of a rebuild."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._pricing = Pricing(options.profiles, options.overhead)

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        """At most one of them, since each move changes the loads."""
        self._pricing.observe(tp_degree(instance), result.n_tokens, result.latency_ms / 1000)
        for request in requests:
            target = self.block_ending(now, request)
            if target is not None:
                return [Move(request, target, at_once=True)]
        return ()

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """As llumnix."""
        return faster_elsewhere(request, self._instances.first(request.model_id), self._pricing)


class MigrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds and requests."""

    policy: str
    instances: int
    rate: float
    """Arrivals a second, per GPU."""
    mean_s: float
    ci95: float | None
    """Of the mean latency."""
    p99_s: float | None
    normalised: float | None
    """Mean latency over that with moves at blocks only."""
    moves: float
    """Of a request."""
    rebuilds: float
    """Of a request."""


def run(session: Session) -> Document[MigrationRow]:
    """Both, and no moves at all, on one to four instances."""
    policies = {**POLICIES, ANYTIME: MovesAnytime}
    bench, overhead = Gsm8k(session, policies), overhead_of(session)
    (rate, *_) = session.options.rates or (RATE,)
    compared = (AT_BLOCKS, ANYTIME, NEVER)
    session.watch.expect(len(INSTANCES) * len(compared) * len(session.seeds))
    rows = []
    for n_instances in INSTANCES:
        at_blocks: float | None = None
        for policy in compared:
            point = Point(
                policy=policy, rate=rate, overhead=overhead, instances=f"{n_instances}xtp1"
            )
            row = _row(point, n_instances, bench.runs(point), at_blocks)
            if row is not None:
                rows.append(row)
                at_blocks = row.mean_s if policy == AT_BLOCKS else at_blocks
    return session.document(
        "table6",
        rows,
        n=bench.n_requests,
        published=ablations().cache_step_migration,
        found={"overhead": overhead},
    )


def page(document: Document[MigrationRow]) -> Page:
    """Ours beside the published."""
    theirs = ablations().cache_step_migration
    published = dict(zip(theirs.instances, theirs.normalised_latency, strict=True))
    rows = [
        [
            row.policy,
            str(row.instances),
            number(row.mean_s, 2),
            number(row.p99_s, 2),
            number(row.moves, 2),
            number(row.rebuilds, 2),
            number(row.normalised, 2),
            number(published.get(row.instances), 2) if row.policy == ANYTIME else "",
        ]
        for row in document.rows
    ]
    head = ("", "instances", "mean s", "p99 s", "moves", "rebuilds", "normalised", "published")
    return Page(
        [Table(head, rows)],
        [
            f"{ANYTIME} moves at cache steps, too; {AT_BLOCKS} where a block begins, {NEVER} "
            "never. Moves and rebuilds are of a request; normalised: mean latency over that of "
            f"{AT_BLOCKS}.",
            "One instance has nowhere to move to; what the published 1.17 there compares is not "
            "said.",
        ],
    )


TABLE_6 = Experiment(
    name="table6",
    what="migration at cache steps against migration where a block begins",
    paper="Table 6",
    row=MigrationRow,
    run=run,
    page=page,
    takes=frozenset({"overhead", "rates"}),
)


def _row(
    point: Point, n_instances: int, runs: Sequence[RunReport], at_blocks: float | None
) -> MigrationRow | None:
    mean = estimate(run.mean_s for run in runs)
    if mean is None:
        return None
    p99 = estimate(run.p99_s for run in runs)
    n = sum(run.n_requests for run in runs)
    return MigrationRow(
        policy=point.policy,
        instances=n_instances,
        rate=point.rate,
        mean_s=round(mean.mean, DIGITS),
        ci95=None if mean.ci95 is None else round(mean.ci95, DIGITS),
        p99_s=None if p99 is None else round(p99.mean, DIGITS),
        normalised=None if at_blocks is None else round(mean.mean / at_blocks, DIGITS),
        moves=round(sum(run.moves.get("moved", 0) for run in runs) / n, DIGITS),
        rebuilds=round(sum(run.n_rebuilds for run in runs) / n, DIGITS),
    )
