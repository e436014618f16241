"""The order of terminations and launches, against all orders that there are."""

from __future__ import annotations

from itertools import permutations

from hypothesis import assume, given, settings

from dilaserve_reconfigurator import stage2
from dilaserve_reconfigurator.planner import place
from dilaserve_reconfigurator.route import Route, find_route
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.stage2 import Placed, Slot, Transition

from .test_stage2 import problems


def transition(nodes: list[int], running: list[Placed], counts: dict[int, int]) -> Transition:
    model = stage2.build_model(nodes, running, counts)
    assert solve(model, 30.0, gap=0.0).has_solution
    return stage2.read_plan(model)


def route(nodes: list[int], running: list[Placed], counts: dict[int, int]) -> Route:
    return find_route(transition(nodes, running, counts), running)


def test_each_launch_is_preceded_by_what_is_in_its_way() -> None:
    running = list(place([8], {1: 8, 2: 0, 4: 0}))
    found = route([8], running, {1: 4, 2: 2, 4: 0})
    assert [
        (len(step.terminate), step.launch.tp_degree if step.launch else 0) for step in found.steps
    ] == [(2, 2), (2, 2)]
    assert [step.n_serving for step in found.steps] == [6, 6]
    assert found.keeps(6)
    assert not found.keeps(7)


def test_large_instance_ends_once_for_all_that_take_its_place() -> None:
    running = list(place([4], {1: 0, 2: 0, 4: 1}))
    found = route([4], running, {1: 4, 2: 0, 4: 0})
    assert [len(step.terminate) for step in found.steps] == [1, 0, 0, 0]
    assert [step.n_serving for step in found.steps] == [0, 1, 2, 3]
    assert found.lowest == 0, "a single node has no room for a floor"


def test_free_gpus_are_used_first() -> None:
    running = [Placed("a", Slot(0, (0, 1, 2, 3)))]
    found = route([4, 4], running, {1: 4, 2: 2, 4: 0})
    assert found.steps[0].terminate == []
    assert found.lowest >= 2


def test_what_only_leaves_does_so_at_the_end() -> None:
    running = list(place([4], {1: 4}))
    found = route([4], running, {1: 1})
    assert [(len(step.terminate), step.launch) for step in found.steps] == [(3, None)]


def test_nothing_to_do() -> None:
    running = list(place([4], {1: 4}))
    assert route([4], running, {1: 4}).steps == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems())
def test_no_order_keeps_more_capacity(
    problem: tuple[list[int], list[Placed], dict[int, int]],
) -> None:
    nodes, running, counts = problem
    moves = transition(nodes, running, counts)
    assume(len(moves.launch) <= 6)
    found = find_route(moves, running)
    lows = [lowest(running, moves, order) for order in permutations(moves.launch)]
    assert found.lowest == max(lows)
    assert_valid(running, moves, found)


def lowest(running: list[Placed], moves: Transition, order: tuple[Slot, ...]) -> int:
    """Fewest GPUs that serve on the way, in this order of launches."""
    leaving = {p.instance_id: p.slot for p in running if p.instance_id in moves.terminate}
    serving = sum(p.slot.tp_degree for p in running)
    low = serving
    for launch in order:
        for name, slot in list(leaving.items()):
            if slot.node == launch.node and set(slot.gpus) & set(launch.gpus):
                serving -= leaving.pop(name).tp_degree
        low = min(low, serving)
        serving += launch.tp_degree
    return min(low, serving - sum(slot.tp_degree for slot in leaving.values()))


def assert_valid(running: list[Placed], moves: Transition, found: Route) -> None:
    """No GPU ever belongs to two, and the end is what was wanted."""
    slots = {placed.instance_id: placed.slot for placed in running}
    for number, step in enumerate(found.steps):
        for name in step.terminate:
            del slots[name]
        assert sum(slot.tp_degree for slot in slots.values()) == step.n_serving >= found.lowest
        if step.launch is not None:
            slots[f"new{number}"] = step.launch
        gpus = [(slot.node, gpu) for slot in slots.values() for gpu in slot.gpus]
        assert len(gpus) == len(set(gpus))
    assert sorted(name for name in slots if not name.startswith("new")) == moves.keep
    launched = [slot for name, slot in slots.items() if name.startswith("new")]
    assert sorted(launched, key=repr) == sorted(moves.launch, key=repr)
