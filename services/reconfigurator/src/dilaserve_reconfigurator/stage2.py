"""Stage 2: which instances stay where they are, as an integer program (paper, 3.3).

The paper's Table 2 has a variable for every slot, GPU and kept instance. Here only counts are
variables: on one node, instances of one degree are alike, and so are GPUs that nobody keeps. The
optimum is the same (a test compares them); 1,024 GPUs are solved in a second.

Knows no clock, no solver and no running instance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pyomo.environ as pyo

from dilaserve_reconfigurator.slots import Slot
from dilaserve_reconfigurator.snapshot import PlanningError

__all__ = ["Placed", "Slot", "Transition", "build_model", "read_plan"]


class Placed(msgspec.Struct, frozen=True):
    """A running instance and where it is."""

    instance_id: str
    slot: Slot


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """From the running instances to the wanted ones."""

    keep: list[str]
    terminate: list[str]
    launch: list[Slot]


@dataclass(frozen=True, slots=True)
class _Problem:
    nodes: Sequence[int]
    running: Sequence[Placed]
    counts: Mapping[int, int]

    def on(self, node: int, degree: int) -> list[Placed]:
        """Running instances of one degree on one node, in order of their ids."""
        found = (p for p in self.running if p.slot.node == node and p.slot.tp_degree == degree)
        return sorted(found, key=lambda placed: placed.instance_id)


def build_model(
    nodes: Sequence[int], running: Iterable[Placed], counts: Mapping[int, int]
) -> pyo.ConcreteModel:
    """The program that gets from `running` to `counts` (instances by TP degree) on nodes of so
    many GPUs. Raises PlanningError for instances that overlap or are on no node."""
    problem = _Problem(tuple(nodes), tuple(running), dict(counts))
    _check(problem)
    model = pyo.ConcreteModel("stage 2")
    model.problem = problem
    model.N = pyo.RangeSet(0, len(nodes) - 1)
    model.D = pyo.Set(initialize=sorted(counts))
    model.kept = pyo.Var(
        model.N,
        model.D,
        within=pyo.NonNegativeIntegers,
        bounds=lambda _, n, d: (0, len(problem.on(n, d))),
    )
    model.launched = pyo.Var(
        model.N,
        model.D,
        within=pyo.NonNegativeIntegers,
        bounds=lambda _, n, d: (0, nodes[n] // d),
    )
    model.compliance = pyo.Constraint(model.D, rule=_compliance)
    model.exclusivity = pyo.Constraint(model.N, rule=_exclusivity)
    model.order = pyo.Constraint(pyo.Set(dimen=2, initialize=_equal_nodes(problem)), rule=_order)
    model.preserved = pyo.Objective(
        expr=sum(model.kept[n, d] for n in model.N for d in model.D), sense=pyo.maximize
    )
    return model


def read_plan(model: pyo.ConcreteModel) -> Transition:
    """The solution that a solver left in the model, down to the GPUs."""
    problem: _Problem = model.problem
    keep = [
        placed
        for n in model.N
        for d in model.D
        for placed in problem.on(n, d)[: round(model.kept[n, d].value)]
    ]
    kept = {placed.instance_id for placed in keep}
    launch = []
    for n in model.N:
        taken = {gpu for placed in keep if placed.slot.node == n for gpu in placed.slot.gpus}
        free = [gpu for gpu in range(problem.nodes[n]) if gpu not in taken]
        for degree in sorted(model.D, reverse=True):
            for _ in range(round(model.launched[n, degree].value)):
                gpus = _take(free, degree)
                launch.append(Slot(n, gpus))
                free = [gpu for gpu in free if gpu not in gpus]
    return Transition(
        keep=sorted(kept),
        terminate=sorted(p.instance_id for p in problem.running if p.instance_id not in kept),
        launch=launch,
    )


def _compliance(model: Any, degree: int) -> Any:
    """Kept and launched instances of a degree are as many as Stage 1 wants."""
    there = sum(model.kept[n, degree] + model.launched[n, degree] for n in model.N)
    return there == model.problem.counts[degree]


def _exclusivity(model: Any, node: int) -> Any:
    """Each GPU belongs to one instance at most; it may stay idle. Kept instances share no GPU, so
    counting GPUs is enough."""
    taken = sum(d * (model.kept[node, d] + model.launched[node, d]) for d in model.D)
    return taken <= model.problem.nodes[node]


def _order(model: Any, first: int, second: int) -> Any:
    """Of two equal nodes the first keeps no fewer GPUs: they could be exchanged otherwise."""
    return sum(d * model.kept[first, d] for d in model.D) >= sum(
        d * model.kept[second, d] for d in model.D
    )


def _equal_nodes(problem: _Problem) -> list[tuple[int, int]]:
    """Neighbours among the nodes that have as many GPUs, and the same instances."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, n_gpus in enumerate(problem.nodes):
        degrees = sorted(p.slot.tp_degree for p in problem.running if p.slot.node == n)
        alike[n_gpus, *degrees].append(n)
    return [pair for nodes in alike.values() for pair in pairwise(nodes)]


def _take(free: Sequence[int], n: int) -> tuple[int, ...]:
    """`n` of the free GPUs: neighbours from a multiple of `n` on, which share the fastest links,
    or else the lowest."""
    for start in range(0, max(free) + 1, n):
        aligned = tuple(range(start, start + n))
        if set(aligned) <= set(free):
            return aligned
    return tuple(free[:n])


def _check(problem: _Problem) -> None:
    seen: dict[tuple[int, int], str] = {}
    for placed in problem.running:
        node = placed.slot.node
        for gpu in placed.slot.gpus:
            if node >= len(problem.nodes) or gpu >= problem.nodes[node]:
                raise PlanningError(
                    f"instance {placed.instance_id} is on GPU {gpu} of node {node}, which is not "
                    "there; correct the list of nodes"
                )
            other = seen.setdefault((node, gpu), placed.instance_id)
            if other != placed.instance_id:
                raise PlanningError(
                    f"instances {other} and {placed.instance_id} share GPU {gpu} of node {node}; "
                    "end one of them"
                )
