"""What a policy can have done, by a policy that does what the test says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from dilaserve.messages import StepResult
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import Ask, Ended, Reassign, Send
from dilaserve_scheduler.core.events import Told
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import (
    Decision,
    Inquire,
    Limit,
    Move,
    Policy,
    Requeue,
    Retune,
    Shelve,
)

from .driver import Driver, command, every, item, only


class Scripted(Policy):
    """Places on the first instance; everything else is set by the test."""

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.on_step: list[Decision] = []
        self.on_tick: list[Decision] = []
        self.on_told: list[Decision] = []
        self.next_stop: Instance | None = None
        self.due: float | None = None
        self.asked: list[int] = []
        self.ends: list[tuple[str, bool]] = []
        self.answers: list[object] = []
        self.last: set[str] = set()

    def place(self, now: float, request: Request) -> Instance | None:
        rooms = [i for i in self.instances if i.state == "live" and i.has_room(request)]
        return rooms[0] if rooms else None

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        return 0.9 if instance is None or instance.name == "a" else 0.7

    def predict_finish_s(self, now: float, request: Request) -> float:
        return 1.0

    def rank(self, request: Request) -> tuple[float, ...]:
        return (request.request_id in self.last, -request.priority, request.arrival_s)

    def joined(self, now: float, instance: Instance) -> Iterable[Decision]:
        self.instances.append(instance)
        return ()

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        return self.on_step

    def block_ending(self, now: float, request: Request) -> Instance | None:
        self.asked.append(request.block)
        return self.next_stop

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        self.ends.append((request.request_id, finished))

    def told(self, now: float, answer: object) -> Iterable[Decision]:
        self.answers.append(answer)
        return self.on_told

    def wake_at(self) -> float | None:
        return self.due

    def tick(self, now: float) -> Iterable[Decision]:
        self.due = None
        return self.on_tick


class Stage(Driver):
    """A driver with a scripted policy and a request on a-0001."""

    def __init__(self, settings: CoreSettings | None = None) -> None:
        self.script = Scripted()
        super().__init__("a-0001", "b-0001", settings=settings, policy=self.script)
        self.admit()
        self.a, self.b = self.script.instances


def test_a_threshold_is_sent_at_once_and_only_when_it_changes() -> None:
    stage = Stage()
    stage.script.on_step = [Retune(stage.request(), 0.6)]
    assert item(stage.result("a-0001", step=1, n_unmasked=1), "a-0001").threshold == 0.6
    assert stage.result("a-0001", step=2, n_unmasked=2) == []


def test_a_shelved_request_waits_after_the_blocks_that_are_credited() -> None:
    """Behind another one: the last of the line by the policy's rank."""
    stage = Stage()
    stage.script.on_step = [Shelve(stage.request())]
    stage.script.last = {"r"}
    assert stage.result("a-0001", step=1, n_unmasked=1) == []
    assert stage.result("a-0001", step=2, n_new=5, n_unmasked=6) == []  # no credit for another
    assert stage.script.asked == []
    call = only(stage.result("a-0001", step=3, n_new=2, n_unmasked=8), Reassign)
    assert (call.owner, call.cause) == ("", "shelved")
    stage.script.on_step = []
    stage.script.instances.clear()  # nobody has room
    effects = stage.reassigned(call)
    assert [release.request_id for release in command(effects, "a-0001").releases] == ["r"]
    assert (stage.request().state, stage.a.n_tokens) == ("parked", 0)
    stage.script.instances.append(stage.b)
    again = only(stage.up("c-0001"), Reassign)
    assert (again.owner, again.cause) == ("b-0001", "placed")
    assert not stage.request().is_leaving
    assert item(stage.reassigned(again), "b-0001").until_block == 1


def test_a_move_takes_back_that_a_request_is_shelved() -> None:
    stage = Stage()
    request = stage.request()
    stage.script.on_step = [Shelve(request), Move(request, stage.a)]
    stage.result("a-0001", step=1, n_unmasked=1)
    stage.script.on_step = []
    assert item(stage.result("a-0001", step=2, n_new=6, n_unmasked=7), "a-0001").until_block == 1


def test_a_limit_of_recomputes_goes_with_every_command_from_the_next_on() -> None:
    stage = Stage()
    stage.script.on_step = [Limit(stage.a, 40)]
    assert stage.result("a-0001", step=1, n_unmasked=1) == []
    stage.script.on_step = [Retune(stage.request(), 0.6)]
    for step in (2, 3):
        sent = command(stage.result("a-0001", step=step, n_unmasked=step), "a-0001")
        assert sent.recompute_tokens == 40
        stage.script.on_step = [Retune(stage.request(), 0.5)]
    stage.script.on_step = [Limit(stage.a, None), Retune(stage.request(), 0.6)]
    sent = command(stage.result("a-0001", step=4, n_unmasked=4), "a-0001")
    assert sent.recompute_tokens is None


def test_many_thresholds_are_one_command() -> None:
    stage = Stage()
    stage.admit("s")
    stage.script.due = stage.now + 1.0
    stage.script.on_tick = [Retune(r, 0.5) for r in stage.core.requests()]
    assert stage.core.wake_at() == stage.now + 1.0
    assert stage.wait(0.5) == []
    sent = command(stage.wait(0.5), "a-0001")
    assert [(i.request_id, i.threshold) for i in sent.items] == [("r", 0.5), ("s", 0.5)]


def test_at_the_end_of_a_block_it_moves_without_another_block_of_credit() -> None:
    stage = Stage()
    stage.script.next_stop = stage.b
    assert stage.result("a-0001", step=1, n_new=6, n_unmasked=6) == []
    assert stage.request().leaving_for is stage.b
    call = only(stage.result("a-0001", step=2, n_new=2, n_unmasked=8), Reassign)
    assert (call.owner, call.cause, call.owner_died) == ("b-0001", "moved", False)
    assert (stage.a.n_tokens, stage.b.n_tokens) == (32, 32)
    effects = stage.reassigned(call)
    assert [(r.request_id, r.epoch) for r in command(effects, "a-0001").releases] == [("r", 1)]
    sent = item(effects, "b-0001")
    assert (sent.epoch, sent.until_block, sent.threshold) == (2, 1, 0.7)
    assert (stage.a.n_tokens, stage.b.n_tokens) == (0, 32)


def test_the_policy_is_asked_once_per_block_and_not_about_the_last() -> None:
    stage = Stage()
    for step, n_unmasked in enumerate((4, 6, 8, 12, 16, 20, 23), start=1):
        stage.result("a-0001", step=step, n_new=4, n_unmasked=n_unmasked)
    assert stage.script.asked == [0, 1]


def test_in_lock_step_a_leaving_request_goes_on_to_the_end_of_its_block() -> None:
    stage = Stage(CoreSettings(run_ahead=1))
    stage.script.next_stop = stage.b
    sent = item(stage.result("a-0001", step=1, n_new=6, n_unmasked=6), "a-0001")
    assert (sent.until_step, sent.until_block) == (2, 0)
    assert every(stage.result("a-0001", step=2, n_new=2, n_unmasked=8), Reassign)


def test_without_room_at_the_end_it_stays() -> None:
    stage = Stage()
    stage.script.next_stop = stage.b
    stage.result("a-0001", step=1, n_new=6, n_unmasked=6)
    stage.b.n_tokens = 250
    effects = stage.result("a-0001", step=2, n_new=2, n_unmasked=8)
    assert every(effects, Reassign) == []
    assert item(effects, "a-0001").until_block == 1


def test_a_move_waits_for_the_blocks_that_are_credited() -> None:
    stage = Stage()
    stage.result("a-0001", step=1, n_new=6, n_unmasked=6)  # credit to the end of block 1
    stage.script.on_step = [Move(stage.request(), stage.b)]
    assert every(stage.result("a-0001", step=2, n_new=2, n_unmasked=8), Reassign) == []
    stage.script.on_step = []
    assert every(stage.result("a-0001", step=3, n_new=8, n_unmasked=16), Reassign)


def test_a_move_at_once_does_not_wait() -> None:
    stage = Stage()
    stage.script.on_step = [Move(stage.request(), stage.b, at_once=True)]
    call = only(stage.result("a-0001", step=1, n_new=3, n_unmasked=3), Reassign)
    assert call.owner == "b-0001"
    assert item(stage.reassigned(call), "b-0001").until_block == 0


def test_a_move_to_where_it_is_calls_an_earlier_one_off() -> None:
    stage = Stage()
    stage.script.next_stop = stage.b
    stage.result("a-0001", step=1, n_new=6, n_unmasked=6)
    stage.script.on_step = [Move(stage.request(), stage.a)]
    assert item(stage.result("a-0001", step=2, n_new=1, n_unmasked=7), "a-0001").until_block == 1


def test_decisions_about_a_request_that_is_moving_are_ignored() -> None:
    stage = Stage()
    request = stage.request()
    call = only(stage.down("a-0001"), Reassign)
    assert call.owner == "b-0001"
    stage.script.on_told = [Retune(request, 0.5), Move(request, stage.b, at_once=True)]
    assert stage.give(Told("x")) == []
    assert request.threshold == 0.9


def test_questions_go_out_and_answers_come_in() -> None:
    stage = Stage()
    stage.script.on_step = [Inquire("how long?")]
    assert only(stage.result("a-0001", step=1, n_unmasked=1), Ask).query == "how long?"
    stage.script.on_told = [Retune(stage.request(), 0.8)]
    assert item(stage.give(Told("not long")), "a-0001").threshold == 0.8
    assert stage.script.answers == ["not long"]


def test_the_policy_hears_how_requests_end() -> None:
    stage = Stage()
    stage.admit("s")
    stage.result("a-0001", step=1, n_unmasked=24, finish="length")
    assert stage.script.ends == [("r", True)]
    effects = stage.result("a-0001", "s", step=1, n_unmasked=1, outcome="terminal")
    assert every(effects, Ended)
    assert stage.script.ends == [("r", True), ("s", False)]


def test_the_waiting_are_placed_in_the_policys_order() -> None:
    stage = Stage()
    for name in ("big1", "big2"):
        stage.admit(name, n_prompt=200)
    for priority, name in enumerate(("low", "high")):
        stage.now += 0.1
        stage.admit(name, n_prompt=200, priority=priority)
    effects = stage.result("a-0001", "big1", step=1, n_unmasked=24, finish="length")
    assert only(effects, Reassign).request_id == "high"


def test_one_whose_rank_has_changed_is_put_into_the_line_anew() -> None:
    stage = Stage()
    for name in ("big1", "big2", "first", "second"):
        stage.admit(name, n_prompt=200)
    stage.script.last = {"first"}
    stage.script.on_told = [Requeue(stage.request("first")), Requeue(stage.request("big1"))]
    assert stage.give(Told("x")) == []
    effects = stage.result("a-0001", "big1", step=1, n_unmasked=24, finish="length")
    assert only(effects, Reassign).request_id == "second"


@pytest.mark.parametrize("settings", [None, CoreSettings(run_ahead=1)])
def test_an_idle_policy_costs_no_commands_beyond_credit(settings: CoreSettings | None) -> None:
    stage = Stage(settings)
    sends = 0
    for step in range(1, 24):
        sends += len(every(stage.result("a-0001", step=step, n_unmasked=step), Send))
    assert sends == (2 if settings is None else 23)
