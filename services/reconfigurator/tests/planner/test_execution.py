"""A transition carried out on a cluster that obeys, fails, dawdles, or loses its planner."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve_reconfigurator.execution import (
    Abort,
    Drain,
    Drained,
    Effect,
    Ended,
    Event,
    Execution,
    Failed,
    Launch,
    Lost,
    Patience,
    Resume,
    Stop,
    Up,
)
from dilaserve_reconfigurator.planner import place
from dilaserve_reconfigurator.route import find_route
from dilaserve_reconfigurator.stage2 import Placed, Slot

from .test_route import transition
from .test_stage2 import problems

PATIENCE = Patience(drain_s=10.0, launch_s=20.0, n_launches=2)


@dataclass
class Cluster:
    """Processes on GPUs. What it is told takes effect when `step` picks it, in any order."""

    serving: dict[str, Slot]
    starting: dict[int, Slot] = field(default_factory=dict)
    todo: list[Effect] = field(default_factory=list)
    lowest: int = 10**6

    def tell(self, effects: list[Effect]) -> None:
        self.todo += effects
        for effect in effects:
            if isinstance(effect, Launch):
                self.starting[effect.attempt] = effect.slot
        self.check()

    def step(self, rng: random.Random, failing: set[Slot]) -> Event | None:
        """Carry one effect out."""
        effect = self.todo.pop(rng.randrange(len(self.todo)))
        event: Event | None = None
        match effect:
            case Drain():
                event = Drained(effect.instance_id)
            case Stop():
                self.serving.pop(effect.instance_id, None)
                event = Ended(effect.instance_id)
            case Launch():
                slot = self.starting.pop(effect.attempt)
                if slot in failing:
                    event = Failed(effect.attempt, "it cannot start")
                else:
                    self.serving[f"new-{len(self.serving)}-{rng.random()}"] = slot
                    event = Up(effect.attempt)
        self.check()
        return event

    def check(self) -> None:
        """No GPU belongs to two."""
        slots = [*self.serving.values(), *self.starting.values()]
        gpus = [(slot.node, gpu) for slot in slots for gpu in slot.gpus]
        assert len(gpus) == len(set(gpus))
        self.lowest = min(self.lowest, sum(s.tp_degree for s in self.serving.values()))

    def placed(self) -> list[Placed]:
        return [Placed(name, slot) for name, slot in self.serving.items()]

    def counts(self) -> dict[int, int]:
        degrees = [slot.tp_degree for slot in self.serving.values()]
        return {degree: degrees.count(degree) for degree in (1, 2, 4)}


def execution(
    nodes: list[int], running: list[Placed], counts: dict[int, int]
) -> tuple[Execution, int]:
    """It, and the fewest GPUs that are to serve on the way."""
    route = find_route(transition(nodes, running, counts), running)
    return Execution(route, running, PATIENCE, nodes=nodes), route.lowest


def carry_out(
    ours: Execution,
    cluster: Cluster,
    rng: random.Random,
    *,
    failing: set[Slot] | None = None,
    killed_after: int = 10**6,
) -> None:
    cluster.tell(ours.start(0.0))
    while cluster.todo and killed_after:
        event = cluster.step(rng, failing or set())
        if event is not None:
            cluster.tell(ours.handle(0.0, event))
        killed_after -= 1


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_obedient_cluster_ends_as_planned_and_serves_all_the_way(
    problem: tuple[list[int], list[Placed], dict[int, int]], seed: int
) -> None:
    nodes, running, counts = problem
    ours, lowest = execution(nodes, running, counts)
    cluster = Cluster({p.instance_id: p.slot for p in running})
    carry_out(ours, cluster, random.Random(seed))
    assert ours.phase == "done"
    assert cluster.counts() == counts
    assert cluster.lowest >= lowest


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(), seed=st.integers(0, 2**16), killed_after=st.integers(0, 12))
def test_killed_planner_finishes_from_what_runs(
    problem: tuple[list[int], list[Placed], dict[int, int]], seed: int, killed_after: int
) -> None:
    """What was being launched when it died comes up by itself, or not."""
    nodes, running, counts = problem
    rng = random.Random(seed)
    ours, _ = execution(nodes, running, counts)
    cluster = Cluster({p.instance_id: p.slot for p in running})
    carry_out(ours, cluster, rng, killed_after=killed_after)
    for attempt, slot in list(cluster.starting.items()):
        del cluster.starting[attempt]
        if rng.random() < 0.5:
            cluster.serving[f"orphan-{attempt}"] = slot
    cluster.todo.clear()
    again, _ = execution(nodes, cluster.placed(), counts)
    carry_out(again, cluster, rng)
    assert again.phase == "done"
    assert cluster.counts() == counts


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(), seed=st.integers(0, 2**16), data=st.data())
def test_failing_launch_is_undone(
    problem: tuple[list[int], list[Placed], dict[int, int]], seed: int, data: st.DataObject
) -> None:
    """Slots that fail do so for ever; what ran before can run again."""
    nodes, running, counts = problem
    moves = transition(nodes, running, counts)
    old = {placed.slot for placed in running}
    failing = {slot for slot in moves.launch if slot not in old and data.draw(st.booleans())}
    route = find_route(moves, running)
    ours, lowest = Execution(route, running, PATIENCE), route.lowest
    cluster = Cluster({p.instance_id: p.slot for p in running})
    before = sum(p.slot.tp_degree for p in running)
    carry_out(ours, cluster, random.Random(seed), failing=failing)
    assert ours.phase == ("given_up" if failing else "done")
    assert ours.is_over
    if failing:
        assert "it cannot start" in ours.reason
    assert cluster.lowest >= min(lowest, before)
    assert not cluster.starting


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=problems(), seed=st.integers(0, 2**16), data=st.data())
def test_failing_place_is_left_out_where_there_is_another(
    problem: tuple[list[int], list[Placed], dict[int, int]], seed: int, data: st.DataObject
) -> None:
    """Either the mix is there all the same, with nothing in a place that fails, or all places of
    that degree were tried that could be had."""
    nodes, running, counts = problem
    moves = transition(nodes, running, counts)
    old = {placed.slot for placed in running}
    failing = {slot for slot in moves.launch if slot not in old and data.draw(st.booleans())}
    ours, _ = execution(nodes, running, counts)
    cluster = Cluster({p.instance_id: p.slot for p in running})
    carry_out(ours, cluster, random.Random(seed), failing=failing)
    assert ours.is_over
    assert not cluster.starting
    assert failing.isdisjoint(cluster.serving.values())
    if ours.phase == "done":
        assert cluster.counts() == counts
    else:
        assert failing


def two_ones_to_one_two() -> tuple[Execution, list[Placed]]:
    running = list(place([2], {1: 2, 2: 0}))
    ours, _ = execution([2], running, {1: 0, 2: 1})
    return ours, running


def test_order_is_drain_stop_launch() -> None:
    ours, running = two_ones_to_one_two()
    names = [placed.instance_id for placed in running]
    assert ours.start(0.0) == [Drain(name) for name in names]
    assert ours.handle(1.0, Drained(names[0])) == []
    assert ours.handle(1.0, Drained(names[1])) == [Stop(name) for name in names]
    assert ours.handle(2.0, Ended(names[1])) == []
    assert ours.handle(2.0, Ended(names[0])) == [Launch(Slot(0, (0, 1)), 1)]
    assert ours.wake_at() == 22.0
    assert ours.handle(3.0, Up(1)) == []
    assert (ours.phase, ours.wake_at()) == ("done", None)


def test_instance_that_does_not_get_empty_is_ended_all_the_same() -> None:
    ours, running = two_ones_to_one_two()
    names = [placed.instance_id for placed in running]
    ours.start(0.0)
    ours.handle(1.0, Drained(names[0]))
    assert ours.tick(9.0) == []
    assert ours.tick(10.0) == [Stop(name) for name in names]
    assert ours.phase == "stopping"


def eight_ones_to_two_fours(floor: int) -> tuple[Execution, list[str], list[str]]:
    """It, those that end first, and the others."""
    running = list(place([8], {1: 8, 2: 0, 4: 0}))
    route = find_route(transition([8], running, {1: 0, 2: 0, 4: 2}), running)
    first = route.steps[0].terminate
    others = [p.instance_id for p in running if p.instance_id not in first]
    return Execution(route, running, PATIENCE, nodes=[8], floor=floor), list(first), others


def test_death_that_takes_capacity_below_the_floor_cuts_a_plan_short() -> None:
    ours, first, others = eight_ones_to_two_fours(floor=4)
    ours.start(0.0)
    assert ours.handle(1.0, Lost(others[0])) == [Resume(name) for name in first]
    assert ours.phase == "cut_short"
    assert others[0] in ours.reason
    assert ours.capacity.lowest == 7


def test_death_in_the_middle_of_a_step_cuts_it_short_before_the_next() -> None:
    ours, first, others = eight_ones_to_two_fours(floor=4)
    ours.start(0.0)
    for event in (Drained, Ended):
        for name in first:
            ours.handle(0.0, event(name))
    assert ours.handle(1.0, Lost(others[0])) == []
    assert ours.handle(2.0, Up(1, "new")) == [Drain(name) for name in others[1:]]
    ours, first, others = eight_ones_to_two_fours(floor=4)
    ours.start(0.0)
    for event in (Drained, Ended):
        for name in first:
            ours.handle(0.0, event(name))
    ours.handle(2.0, Up(1, "new"))
    assert ours.handle(3.0, Lost("new")) == [Resume(name) for name in others]
    assert ours.phase == "cut_short"


def test_one_that_died_while_it_drained_is_not_resumed() -> None:
    ours, first, others = eight_ones_to_two_fours(floor=4)
    ours.start(0.0)
    assert ours.handle(1.0, Lost(first[0])) == []
    assert ours.handle(1.0, Lost(others[0])) == [Resume(name) for name in first[1:]]


def test_death_where_no_floor_is_to_be_kept_does_not_matter() -> None:
    ours, _, others = eight_ones_to_two_fours(floor=0)
    ours.start(0.0)
    assert ours.handle(1.0, Lost(others[0])) == []
    assert not ours.is_over


def test_one_that_dies_while_it_is_to_get_empty_need_not_be_waited_for() -> None:
    ours, running = two_ones_to_one_two()
    names = [placed.instance_id for placed in running]
    ours.start(0.0)
    ours.handle(1.0, Drained(names[0]))
    assert ours.handle(1.0, Lost(names[1])) == [Stop(names[0])]
    assert ours.handle(2.0, Ended(names[0])) == [Launch(Slot(0, (0, 1)), 1)]
    both, running = two_ones_to_one_two()
    both.start(0.0)
    both.handle(1.0, Lost(names[0]))
    assert both.handle(1.0, Lost(names[1])) == [Launch(Slot(0, (0, 1)), 1)]


def test_a_pause_is_the_time_below_the_floor() -> None:
    ours, running = two_ones_to_one_two()
    names = [placed.instance_id for placed in running]
    ours.start(0.0)
    for name in names:
        ours.handle(3.0, Drained(name))
    for name in names:
        ours.handle(4.0, Ended(name))
    assert (ours.capacity.lowest, ours.capacity.paused_s(5.0)) == (0, 2.0)
    ours.handle(9.0, Up(1))
    assert ours.capacity.paused_s(20.0) == 6.0


def test_launch_that_fails_goes_to_free_gpus() -> None:
    running = [Placed("a", Slot(0, (0,)))]
    ours, _ = execution([4], running, {1: 2, 2: 0})
    (launch,) = ours.start(0.0)
    assert launch == Launch(Slot(0, (1,)), 1)
    ours.handle(1.0, Failed(1, "bad GPU"))
    assert ours.handle(2.0, Failed(2, "bad GPU")) == [Launch(Slot(0, (2,)), 3)]
    assert ours.handle(3.0, Up(3)) == []
    assert ours.phase == "done"


def test_launch_that_fails_changes_places_with_a_later_one() -> None:
    """So the bad place is tried again last, and given up there."""
    ours, _ = execution([2], [], {1: 2, 2: 0})
    assert ours.start(0.0) == [Launch(Slot(0, (0,)), 1)]
    ours.handle(1.0, Failed(1, "bad GPU"))
    assert ours.handle(1.0, Failed(2, "bad GPU")) == [Launch(Slot(0, (1,)), 3)]
    assert ours.handle(2.0, Up(3)) == [Launch(Slot(0, (0,)), 4)]
    ours.handle(3.0, Failed(4, "bad GPU"))
    assert ours.handle(3.0, Failed(5, "bad GPU")) == []
    assert (ours.phase, ours.reason) == ("given_up", "bad GPU")


def test_stop_is_repeated_until_it_is_heard() -> None:
    ours, running = two_ones_to_one_two()
    names = [placed.instance_id for placed in running]
    ours.start(0.0)
    for name in names:
        ours.handle(0.0, Drained(name))
    ours.handle(1.0, Ended(names[0]))
    assert ours.tick(10.0) == [Stop(names[1])]
    assert not ours.is_over


def launching() -> tuple[Execution, list[Placed]]:
    ours, running = two_ones_to_one_two()
    ours.start(0.0)
    for event in (Drained, Ended):
        for placed in running:
            ours.handle(0.0, event(placed.instance_id))
    assert ours.phase == "launching"
    return ours, running


def test_late_launch_is_gone_before_its_gpus_are_used_again() -> None:
    ours, _ = launching()
    assert ours.tick(20.0) == [Abort(1)]
    assert ours.tick(30.0) == []
    assert ours.tick(40.0) == [Abort(1)]
    assert ours.handle(41.0, Failed(1, "aborted")) == [Launch(Slot(0, (0, 1)), 2)]


def test_late_launch_that_serves_after_all_is_welcome() -> None:
    ours, _ = launching()
    ours.tick(20.0)
    assert ours.handle(21.0, Up(1)) == []
    assert ours.phase == "done"


def test_launch_that_fails_again_is_replaced_by_what_ran_there() -> None:
    ours, running = launching()
    ours.handle(1.0, Failed(1, "out of memory"))
    first, second = (placed.slot for placed in running)
    assert ours.handle(2.0, Failed(2, "out of memory")) == [Launch(first, 3)]
    assert ours.phase == "undoing"
    assert ours.handle(3.0, Up(3)) == [Launch(second, 4)]
    assert ours.handle(4.0, Up(4)) == []
    assert (ours.phase, ours.reason) == ("given_up", "out of memory")


def test_what_cannot_be_undone_is_named() -> None:
    ours, _ = launching()
    for attempt in (1, 2, 3, 4):
        ours.handle(1.0, Failed(attempt, "no GPU"))
    assert ours.handle(2.0, Up(5)) == []
    assert ours.reason == "no GPU; nor could TP-1 on node 0, GPU 0 be launched again"


@pytest.mark.parametrize("event", [Drained("x"), Ended("x"), Up(7), Failed(7, "")])
def test_events_of_other_times_change_nothing(event: Event) -> None:
    ours, _ = launching()
    assert ours.handle(1.0, event) == []
    assert ours.phase == "launching"
