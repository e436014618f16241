"""Stage 2: what stays, what goes, what comes; by hand, and against the paper's own program."""

from __future__ import annotations

import pyomo.environ as pyo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve_reconfigurator import stage2
from dilaserve_reconfigurator.snapshot import PlanningError
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.spare import fits
from dilaserve_reconfigurator.stage2 import Placed, Slot, Transition

EIGHT = [Placed(f"w{node}{gpu}", Slot(node, (gpu,))) for node in (0, 1) for gpu in range(4)]
"""Two nodes of four TP-1 instances."""


def transition(
    nodes: list[int], running: list[Placed], counts: dict[int, int]
) -> Transition | None:
    model = stage2.build_model(nodes, running, counts)
    return stage2.read_plan(model) if solve(model, 30.0, gap=0.0).has_solution else None


def test_nothing_changes_when_all_is_there() -> None:
    plan = transition([4, 4], EIGHT, {1: 8, 2: 0, 4: 0})
    assert plan is not None
    assert len(plan.keep) == 8
    assert plan.terminate == plan.launch == []


def test_compliance_launches_what_is_wanted() -> None:
    plan = transition([4, 4], [], {1: 1, 2: 1, 4: 1})
    assert plan is not None
    assert sorted(slot.tp_degree for slot in plan.launch) == [1, 2, 4]


def test_as_many_stay_as_possible() -> None:
    """TP-4 takes a whole node, so four stay."""
    plan = transition([4, 4], EIGHT, {1: 4, 4: 1})
    assert plan is not None
    assert plan.keep == ["w10", "w11", "w12", "w13"] or plan.keep == ["w00", "w01", "w02", "w03"]
    assert [slot.tp_degree for slot in plan.launch] == [4]


def test_gpus_may_stay_idle() -> None:
    plan = transition([4], EIGHT[:4], {1: 2})
    assert plan is not None
    assert plan.keep == ["w00", "w01"]
    assert plan.launch == []


def test_exclusivity_leaves_no_gpu_to_two() -> None:
    assert transition([4], [], {2: 3}) is None
    assert transition([3, 3], [], {2: 3}) is None, "six GPUs, but one of each node is left over"


def test_kept_instance_keeps_its_gpus() -> None:
    """The TP-2 in the middle leaves no two neighbours from an even number on."""
    middle = Placed("middle", Slot(0, (1, 2)))
    plan = transition([4], [middle], {2: 2})
    assert plan is not None
    assert plan.keep == ["middle"]
    assert plan.launch == [Slot(0, (0, 3))]


def test_launched_instance_takes_neighbours() -> None:
    plan = transition([8], [Placed("a", Slot(0, (1,)))], {1: 1, 2: 1, 4: 1})
    assert plan is not None
    assert plan.launch == [Slot(0, (4, 5, 6, 7)), Slot(0, (2, 3))]


def test_degree_that_is_no_longer_wanted_goes() -> None:
    plan = transition([4], [Placed("a", Slot(0, (0, 1)))], {1: 2})
    assert plan is not None
    assert plan.terminate == ["a"]


def test_instances_that_share_a_gpu_are_refused() -> None:
    both = [Placed("a", Slot(0, (0, 1))), Placed("b", Slot(0, (1,)))]
    with pytest.raises(PlanningError, match="a and b share GPU 1 of node 0"):
        stage2.build_model([4], both, {1: 1})


def test_instance_on_no_node_is_refused() -> None:
    with pytest.raises(PlanningError, match="is on GPU 4 of node 0, which is not there"):
        stage2.build_model([4], [Placed("a", Slot(0, (4,)))], {1: 1})


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Placed], dict[int, int]]:
    """Two or three small nodes, some instances on them, and a mix that fits."""
    nodes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=3))
    running = []
    for node, n_gpus in enumerate(nodes):
        gpus = draw(st.permutations(range(n_gpus)))
        while gpus:
            degree = draw(st.sampled_from([d for d in (1, 2, 4) if d <= len(gpus)]))
            if draw(st.booleans()):
                slot = Slot(node, tuple(sorted(gpus[:degree])))
                running.append(Placed(f"i{len(running)}", slot))
            gpus = gpus[degree:]
    counts = draw(
        st.fixed_dictionaries({d: st.integers(0, 4) for d in (1, 2, 4)}).filter(
            lambda counts: fits(nodes, counts)
        )
    )
    return nodes, running, counts


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problem=problems())
def test_keeps_as_many_as_the_papers_program(
    problem: tuple[list[int], list[Placed], dict[int, int]],
) -> None:
    nodes, running, counts = problem
    plan = transition(nodes, running, counts)
    assert plan is not None
    literal = slot_model(nodes, running, counts)
    assert solve(literal, 30.0, gap=0.0).status == "solved"
    assert len(plan.keep) == round(pyo.value(literal.preserved))
    assert_valid(nodes, running, counts, plan)


def assert_valid(
    nodes: list[int], running: list[Placed], counts: dict[int, int], plan: Transition
) -> None:
    kept = [placed.slot for placed in running if placed.instance_id in plan.keep]
    slots = [*kept, *plan.launch]
    for degree, n in counts.items():
        assert sum(slot.tp_degree == degree for slot in slots) == n
    gpus = [(slot.node, gpu) for slot in slots for gpu in slot.gpus]
    assert len(gpus) == len(set(gpus))
    assert all(gpu < nodes[node] for node, gpu in gpus)
    assert sorted(plan.keep + plan.terminate) == sorted(p.instance_id for p in running)


def slot_model(
    nodes: list[int], running: list[Placed], counts: dict[int, int]
) -> pyo.ConcreteModel:
    """Stage 2 as printed (paper, Table 2), with idle GPUs allowed."""
    model = pyo.ConcreteModel()
    slots = [
        (n, d, slot_no)
        for n, n_gpus in enumerate(nodes)
        for d in counts
        for slot_no in range(n_gpus // d)
    ]
    owned = [(*slot, g) for slot in slots for g in range(nodes[slot[0]])]
    pairs = [
        (i, slot_no)
        for i, placed in enumerate(running)
        for n, d, slot_no in slots
        if (n, d) == (placed.slot.node, placed.slot.tp_degree)
    ]
    model.u = pyo.Var(slots, within=pyo.Binary)
    model.a = pyo.Var(owned, within=pyo.Binary)
    model.m = pyo.Var(pairs, within=pyo.Binary)
    model.rules = pyo.ConstraintList()
    for d, wanted in counts.items():
        active = [model.u[slot] for slot in slots if slot[1] == d]
        if active:
            model.rules.add(sum(active) == wanted)
    for n, d, slot_no in slots:
        gpus = sum(model.a[n, d, slot_no, g] for g in range(nodes[n]))
        model.rules.add(gpus == d * model.u[n, d, slot_no])
    for n, n_gpus in enumerate(nodes):
        for g in range(n_gpus):
            model.rules.add(sum(model.a[k] for k in owned if (k[0], k[3]) == (n, g)) <= 1)
    for i, placed in enumerate(running):
        mine = [slot_no for j, slot_no in pairs if j == i]
        if mine:
            model.rules.add(sum(model.m[i, slot_no] for slot_no in mine) <= 1)
        for slot_no in mine:
            slot = (placed.slot.node, placed.slot.tp_degree, slot_no)
            model.rules.add(model.m[i, slot_no] <= model.u[slot])
            for g in placed.slot.gpus:
                model.rules.add(model.m[i, slot_no] <= model.a[(*slot, g)])
    total = sum(model.m[pair] for pair in pairs)
    model.preserved = pyo.Objective(expr=total, sense=pyo.maximize)
    return model
