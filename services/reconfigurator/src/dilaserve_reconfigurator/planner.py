"""From a workload and a cluster to a plan: both stages, what is spare, and the verdict.

Knows no clock and no running process; ids and `now` are passed in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dilaserve.messages import CacheMode
from dilaserve.profiles import ProfileSet
from dilaserve_reconfigurator import shortfall, stage1, stage2
from dilaserve_reconfigurator.decision import Change, Costs, Judgement, decide
from dilaserve_reconfigurator.monitor import Missing, Workload, coarsen
from dilaserve_reconfigurator.record import Inputs, Mix, PlanRecord
from dilaserve_reconfigurator.snapshot import Pace, PlanningError, Snapshot, degree_speeds
from dilaserve_reconfigurator.solving import GAP, Outcome, SolverName, pick_solver, solve
from dilaserve_reconfigurator.spare import fill, only
from dilaserve_reconfigurator.stage1 import CapacityPlan
from dilaserve_reconfigurator.stage2 import Placed, Transition

__all__ = ["Cluster", "Planner", "PlannerOptions", "place"]

PARTS = (0.5, 0.3, 0.2)
"""Of the budget: the best mix, the present one, and the way between them or what is lacking."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes' GPUs, and the instances that run on them."""

    nodes: tuple[int, ...]
    running: tuple[Placed, ...]

    def counts(self, degrees: Sequence[int]) -> dict[int, int]:
        """Running instances by TP degree."""
        found = Counter(placed.slot.tp_degree for placed in self.running)
        return {degree: found[degree] for degree in sorted({*degrees, *found})}


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How the model is served, and how plans are made. Seconds and tokens."""

    profiles: ProfileSet
    paces: tuple[Pace, ...]
    degrees: tuple[int, ...]
    block_length: int = 32
    cache_mode: CacheMode = "dual"
    max_batch_tokens: int = 8192
    overhead: float = 1.0
    """Factor on the profile."""
    rate_factor: float = 1.5
    max_classes: int = 20
    budget_s: float = 20.0
    gap: float = GAP
    solver: SolverName = "highs"
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        """Raises PlanningError for numbers that make no sense, however they came here."""
        above_0 = {
            "block length": self.block_length,
            "token budget of an instance": self.max_batch_tokens,
            "overhead": self.overhead,
            "safety factor on the rates": self.rate_factor,
            "time limit": self.budget_s,
        }
        for name, value in above_0.items():
            if not 0 < value < math.inf:
                raise PlanningError(f"{name} {value:g}: it has to be above 0")
        for name, value in (("launch", self.costs.launch_s), ("gain", self.costs.min_gain)):
            if not 0 <= value < math.inf:
                raise PlanningError(f"{name} {value:g}: it has to be 0 or above")


@dataclass(frozen=True, slots=True)
class _Stage1:
    outcome: Outcome
    plan: CapacityPlan | None


class Planner:
    """Makes plans. Whoever carries one out says so by `changed`."""

    def __init__(self, options: PlannerOptions, new_id: Callable[[], str]) -> None:
        self._options = options
        self._new_id = new_id
        self._last: Change | None = None

    def changed(self, now: float, record: PlanRecord) -> None:
        """A plan has been carried out."""
        self._last = Change(now, dict(record.present.counts), record.payback_s or 0.0)

    def plan(self, now: float, workload: Workload | Missing, cluster: Cluster) -> PlanRecord:
        """What to do now. Raises PlanningError and ProfileError for what cannot be planned."""
        present = Mix(counts=cluster.counts(self._options.degrees))
        if isinstance(workload, Missing):
            return self._idle(now, "hold", f"held: {workload.reason}", present)
        if not workload.classes:
            return self._idle(now, "keep", "there is no load", present)
        snapshot = self._snapshot(workload, cluster)
        unreachable = stage1.unreachable(snapshot)
        best = self._solve(snapshot, None, unreachable, PARTS[0])
        as_it_is = self._solve(snapshot, present.counts, unreachable, PARTS[1])
        present = _mix(snapshot, present.counts, as_it_is.plan)
        target, judgement = self._judge(now, snapshot, present, best)
        if judgement.verdict == "keep" and best.plan is None:
            judgement.reasons.extend(self._lacking(snapshot, present.counts, unreachable))
        transition, moves = None, None
        if judgement.verdict == "change":
            transition, moves = self._moves(cluster, target.counts)
        return PlanRecord(
            plan_id=self._new_id(),
            made_at_s=now,
            verdict=judgement.verdict,
            reasons=judgement.reasons,
            present=present,
            target=target if judgement.verdict == "change" else present,
            inputs=_inputs(snapshot, workload, unreachable),
            best=best.outcome,
            as_it_is=as_it_is.outcome,
            moves=moves,
            transition=transition,
            payback_s=judgement.payback_s,
        )

    def _idle(self, now: float, verdict: str, reason: str, present: Mix) -> PlanRecord:
        return PlanRecord(
            plan_id=self._new_id(),
            made_at_s=now,
            verdict="hold" if verdict == "hold" else "keep",
            reasons=[reason],
            present=present,
            target=present,
        )

    def _snapshot(self, workload: Workload, cluster: Cluster) -> Snapshot:
        options = self._options
        _check_degrees(options.profiles, options.degrees)
        classes = coarsen(workload.classes, options.max_classes)
        return Snapshot(
            classes=classes,
            nodes=cluster.nodes,
            speeds=degree_speeds(
                options.profiles,
                classes,
                degrees={*options.degrees, *(p.slot.tp_degree for p in cluster.running)},
                paces=options.paces,
                max_batch_tokens=options.max_batch_tokens,
                block_length=options.block_length,
                cache_mode=options.cache_mode,
                overhead=options.overhead,
            ),
            paces=options.paces,
            block_length=options.block_length,
            cache_mode=options.cache_mode,
            rate_factor=options.rate_factor,
        )

    def _solve(
        self,
        snapshot: Snapshot,
        counts: Mapping[int, int] | None,
        unreachable: frozenset[int],
        part: float,
    ) -> _Stage1:
        options = self._options
        model = stage1.build_model(snapshot, counts=counts, unreachable=unreachable)
        solver = pick_solver(options.solver, model)
        outcome = solve(model, part * options.budget_s, solver=solver, gap=options.gap)
        return _Stage1(outcome, stage1.read_plan(model) if outcome.has_solution else None)

    def _judge(
        self, now: float, snapshot: Snapshot, present: Mix, best: _Stage1
    ) -> tuple[Mix, Judgement]:
        if best.outcome.status == "no_incumbent":
            return present, Judgement("hold", ["held: the time for planning ran out"])
        if best.plan is None:
            smallest = only(snapshot.nodes, snapshot.degrees, snapshot.degrees[0])
            target = Mix(counts=smallest)
        else:
            target = _mix(snapshot, fill(snapshot.nodes, best.plan.loads), best.plan)
        judgement = decide(now, present, target, self._options.costs, self._last)
        if best.outcome.status == "time_limit":
            judgement.reasons.append("the time ran out; this is the best found until then")
        return target, judgement

    def _lacking(
        self, snapshot: Snapshot, counts: Mapping[int, int], unreachable: frozenset[int]
    ) -> Iterator[str]:
        """What the mix needs for the load, which no mix can serve, if that is known in time."""
        if not any(counts.values()):
            return
        model = shortfall.build_model(snapshot, counts, unreachable)
        options = self._options
        solver = pick_solver(options.solver, model)
        outcome = solve(model, PARTS[2] * options.budget_s, solver=solver, gap=options.gap)
        if outcome.has_solution:
            yield shortfall.lacking(model)
        elif outcome.status == "infeasible":
            yield shortfall.too_late(snapshot, counts, unreachable)

    def _moves(
        self, cluster: Cluster, counts: Mapping[int, int]
    ) -> tuple[Transition | None, Outcome]:
        model = stage2.build_model(cluster.nodes, cluster.running, counts)
        solver = pick_solver(self._options.solver, model)
        outcome = solve(
            model, PARTS[2] * self._options.budget_s, solver=solver, gap=self._options.gap
        )
        if outcome.status == "infeasible":
            raise PlanningError(f"{dict(counts)} do not fit on nodes of {list(cluster.nodes)} GPUs")
        return (stage2.read_plan(model) if outcome.has_solution else None), outcome


def place(nodes: Sequence[int], counts: Mapping[int, int]) -> tuple[Placed, ...]:
    """Instances of a mix on nodes, the largest first, as a what-if needs them. Raises
    PlanningError where there is no room."""
    model = stage2.build_model(nodes, (), counts)
    if not solve(model, 10.0).has_solution:
        raise PlanningError(f"{dict(counts)} do not fit on nodes of {list(nodes)} GPUs")
    slots = stage2.read_plan(model).launch
    return tuple(Placed(f"i{number}", slot) for number, slot in enumerate(slots))


def _check_degrees(profiles: ProfileSet, degrees: Sequence[int]) -> None:
    """Raises PlanningError where one was not measured."""
    missing = [str(degree) for degree in degrees if degree not in profiles.tp_degrees]
    measured = ",".join(str(degree) for degree in degrees if degree in profiles.tp_degrees)
    if missing:
        plan_with = (
            f"plan with those that it has (--degrees {measured}, or for the planner as a service "
            f"DILASERVE_TP_DEGREES={measured}), or "
        )
        raise PlanningError(
            f"the profile of {profiles.model} on {profiles.device} has no TP degree "
            f"{' and '.join(missing)}, only {', '.join(map(str, profiles.tp_degrees))}; "
            f"{plan_with if measured else ''}measure with `dilaserve profile --tp "
            f"{','.join(missing)}`"
        )


def _mix(snapshot: Snapshot, counts: Mapping[int, int], plan: CapacityPlan | None) -> Mix:
    if plan is None:
        return Mix(counts=dict(counts))
    work = zip(snapshot.classes, plan.latencies, strict=True)
    return Mix(
        counts=dict(counts),
        mean_threshold=plan.mean_threshold,
        mean_slack=plan.mean_slack,
        mean_latency_s=sum(c.rate * latency_s for c, latency_s in work) / snapshot.total_rate,
        loads=plan.loads,
        batch_sizes=plan.batch_sizes,
    )


def _inputs(snapshot: Snapshot, workload: Workload, unreachable: frozenset[int]) -> Inputs:
    return Inputs(
        classes=list(snapshot.classes),
        nodes=list(snapshot.nodes),
        paces=list(snapshot.paces),
        degrees=list(snapshot.degrees),
        block_length=snapshot.block_length,
        cache_mode=snapshot.cache_mode,
        rate_factor=snapshot.rate_factor,
        seen_s=workload.seen_s,
        n_requests=workload.n_requests,
        unreachable=sorted(unreachable),
    )
