"""What deciding costs against what it decides about (the paper's Figure 9b): seconds of the
scheduling core over seconds of the passes, under the peak of the real day.

Figure 9a, scores of a language model as a judge, cannot be repeated without one: what thresholds do
to answers is measured by `quality` and `fig3` with answers that can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file, sharegpt_classes
from dilaserve_bench.data.ablations import ablations
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import overhead_of
from dilaserve_bench.experiments.gsm8k import N_REQUESTS, QUICK_REQUESTS
from dilaserve_bench.experiments.page import Page, Table, number, percent
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import estimate
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson

__all__ = ["FIGURE_9", "SharesRow"]

SLO_S = 12.5
N_GPUS = 16
POLICIES = ("infaas", "llumnix", "tediserve", "dilaserve")


class SharesRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy: means over seeds. Milliseconds of the machine against those of the profile."""

    policy: str
    rate: float
    """Arrivals a second, per GPU."""
    deciding_ms: float
    """Of the core, for each pass: all events of the requests in it."""
    pass_ms: float
    share: float
    ci95: float | None
    """Of the share."""


class Costs(msgspec.Struct, frozen=True):
    """Of one run."""

    deciding_ms: float
    pass_ms: float


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    rate: float
    overhead: float
    n_requests: int
    seed: int


def run(session: Session) -> Document[SharesRow]:
    """Poisson arrivals at the peak of the day, with the day's sizes."""
    overhead, n = overhead_of(session), session.size(N_REQUESTS, QUICK_REQUESTS)
    (rate, *_) = session.options.rates or (max(average_day().rates) / N_GPUS,)
    measure = _Measure(session)
    policies = session.options.policies or POLICIES
    session.watch.expect(len(policies) * len(session.seeds))
    rows = []
    for policy in policies:
        keys = [
            _Key(policy=policy, rate=rate, overhead=overhead, n_requests=n, seed=seed)
            for seed in session.seeds
        ]
        costs = [session.measured(key, Costs, partial(measure, key)) for key in keys]
        row = _row(policy, rate, [cost for cost in costs if cost is not None])
        if row is not None:
            rows.append(row)
    return session.document(
        "fig9",
        rows,
        n=n,
        published={"scheduling_share": ablations().scheduling_share},
        found={"overhead": overhead},
    )


def page(document: Document[SharesRow]) -> Page:
    """Ours beside the published."""
    published = ablations().scheduling_share
    rows = [
        [
            row.policy,
            number(row.rate, 2),
            number(row.deciding_ms, 3),
            number(row.pass_ms, 2),
            percent(row.share, 2),
            percent(published.get(row.policy)),
        ]
        for row in document.rows
    ]
    head = ("policy", "rate", "deciding ms", "pass ms", "share", "published")
    return Page(
        [Table(head, rows)],
        [
            "Deciding: the core's thread time for each pass, on the machine that ran this; pass: "
            "the H100 profile times the step overhead. The published share is of a scheduler that "
            "also talks to its workers; ours does that elsewhere.",
            "Figure 9a, the scores of a language model as a judge, is not repeated: there is none "
            "here.",
        ],
    )


FIGURE_9 = Experiment(
    name="fig9",
    what="time of deciding over time of the passes, under the peak of the real day",
    paper="Figure 9b",
    row=SharesRow,
    run=run,
    page=page,
    takes=frozenset({"overhead", "policies", "rates"}),
    n_seeds=4,
)


class _Measure:
    """Runs of the twin with its core timed."""

    def __init__(self, session: Session) -> None:
        self._watch = session.watch
        self._profiles = load_profiles(data_file("h100_llada.json"))
        self._table = load_steps(data_file("gsm8k_llada_steps.json"))

    def __call__(self, key: _Key) -> Costs | None:
        simulation = Simulation(
            self._scenario(key),
            self._workloads(key)(key.seed),
            key.seed,
            timer=time.thread_time,
            time_core=True,
        )
        with self._watch.follow(simulation, f"{key.policy}, seed {key.seed}") as look:
            done = simulation.run(look)
        return _costs(done) if done.is_complete else None

    def _scenario(self, key: _Key) -> Scenario:
        spec = ClusterSpec(groups=parse_mix(f"{N_GPUS}xtp1"), overhead=key.overhead)
        options = SimulateOptions(policy=key.policy, slo_s=SLO_S)
        return Scenario(
            cluster=spec,
            profiles=self._profiles,
            policy=lambda: make_policy(options, self._profiles),
            source=lambda workload: recorded_source(self._table, workload),
            core=core_settings(spec.heartbeat_s, None),
            adviser=lambda workload: stand_in(self._table, workload, options),
        )

    def _workloads(self, key: _Key) -> Workloads:
        classes = [
            RequestClass(n_prompt=n_prompt, n_output=n_output, weight=weight, slo_s=SLO_S)
            for n_prompt, n_output, weight in sharegpt_classes().classes
        ]
        return poisson(
            classes, rate=key.rate * N_GPUS, n=key.n_requests, n_cases=len(self._table.rows)
        )


def _costs(done: Run) -> Costs:
    n_passes = done.measured.n_passes
    busy_s = sum(slot.busy_s for slot in done.measured.slots.values())
    deciding_s = sum(done.core_calls.seconds)
    return Costs(1000 * deciding_s / n_passes, 1000 * busy_s / n_passes)


def _row(policy: str, rate: float, costs: Sequence[Costs]) -> SharesRow | None:
    share = estimate(cost.deciding_ms / cost.pass_ms for cost in costs)
    if share is None:
        return None
    return SharesRow(
        policy=policy,
        rate=rate,
        deciding_ms=round(sum(cost.deciding_ms for cost in costs) / len(costs), DIGITS),
        pass_ms=round(sum(cost.pass_ms for cost in costs) / len(costs), DIGITS),
        share=round(share.mean, DIGITS),
        ci95=None if share.ci95 is None else round(share.ci95, DIGITS),
    )
