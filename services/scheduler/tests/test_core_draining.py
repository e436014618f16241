"""An instance that is to get empty: nothing new comes, what is there leaves or ends, and all of it
survives the loss of whoever asked, and of the scheduler that was asked."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dilaserve.messages import Admitted, Refused
from dilaserve.plan_messages import Drain, Drained, NotDrained
from dilaserve_scheduler.core.effects import Admit, AnswerDrain, Effect, Log, Reassign, Reply
from dilaserve_scheduler.core.events import Recovered
from dilaserve_scheduler.core.policy import Move
from dilaserve_scheduler.policies import POLICIES

from .driver import BLOCK, Driver, command, every, item, only, stored
from .world import World, call


def left(effects: list[Effect]) -> int:
    """How many requests the instance still holds, as the planner is told."""
    answer = only(effects, AnswerDrain).answer
    assert isinstance(answer, Drained)
    return answer.n_left


def test_a_draining_instance_gets_no_request() -> None:
    driver = Driver("a-0001", "b-0001")
    assert left(driver.drain("a-0001")) == 0
    for number in range(5):
        driver.admit(f"r{number}")
    owners = {r.instance.instance_id for r in driver.core.requests() if r.instance}
    assert owners == {"b-0001"}


def test_its_requests_leave_at_the_end_of_their_block_with_all_that_is_committed() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.up("b-0001")
    assert left(driver.drain("a-0001")) == 1
    assert every(driver.result("a-0001", step=1, n_new=7, n_unmasked=7), Reassign) == []
    move = only(driver.result("a-0001", step=2, n_new=1, n_unmasked=8), Reassign)
    assert (move.owner, move.cause, move.owner_died) == ("b-0001", "moved", False)
    effects = driver.reassigned(move)
    assert [r.epoch for r in command(effects, "a-0001").releases] == [1]
    assert item(effects, "b-0001").epoch == 2
    request = driver.request()
    assert (request.epoch, request.step, request.n_unmasked) == (2, 2, 8)
    assert left(driver.drain("a-0001")) == 0


def test_where_nobody_has_room_they_stay_and_are_asked_again_at_the_next_block() -> None:
    driver = Driver("a-0001")
    driver.admit(n_output=64)
    driver.drain("a-0001")
    effects = driver.result("a-0001", step=1, n_new=8, n_unmasked=8)
    assert every(effects, Reassign) == []
    assert item(effects, "a-0001").until_block == 2, "asked at once, since it runs a block a step"
    driver.up("b-0001")
    assert driver.result("a-0001", step=2, n_new=8, n_unmasked=16) == []
    move = only(driver.result("a-0001", step=3, n_new=8, n_unmasked=24), Reassign)
    assert move.owner == "b-0001"


def test_one_that_goes_takes_nothing_along() -> None:
    """Stopped before it is empty: its last requests move at once, and nobody counts a death."""
    driver = Driver("a-0001")
    driver.admit()
    driver.up("b-0001")
    driver.drain("a-0001")
    move = only(driver.down("a-0001"), Reassign)
    assert (move.owner, move.cause, move.owner_died) == ("b-0001", "left", False)


def test_resume_gives_it_requests_again() -> None:
    driver = Driver("a-0001")
    driver.drain("a-0001")
    assert only(driver.submit(), Admit).owner == ""
    driver.admitted(only(driver.submit("s"), Admit))
    effects = driver.drain("a-0001", resume=True)
    assert left(effects) == 0
    assert only(effects, Reassign).owner == "a-0001"


def test_a_word_that_nobody_repeats_is_void() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.drain("a-0001", hold_s=3.0)
    driver.beats(2.0, "a-0001", "b-0001")
    driver.drain("a-0001", hold_s=3.0)
    driver.beats(2.0, "a-0001", "b-0001")
    assert driver.core.wake_at() is not None
    assert [i.is_draining for i in driver.core.instances()] == [True, False]
    driver.beats(1.0, "a-0001", "b-0001")
    assert [i.is_draining for i in driver.core.instances()] == [False, False]
    assert only(driver.submit(), Admit).owner == "a-0001"


def test_one_that_is_not_known_is_answered_with_a_remedy() -> None:
    driver = Driver("a-0001")
    answer = only(driver.drain("z-0001"), AnswerDrain).answer
    assert isinstance(answer, NotDrained)
    assert "dilaserve status" in answer.reason


def test_a_new_scheduler_learns_of_it_from_the_next_word() -> None:
    driver = Driver()
    driver.give(Recovered((stored("r"),)))
    assert left(driver.drain("a-0001")) == 1
    driver.up("a-0001")
    driver.up("b-0001")
    assert only(driver.submit("s"), Admit).owner == "b-0001"


def test_the_status_says_draining_and_dead_once_it_is_silent() -> None:
    driver = Driver("a-0001")
    driver.drain("a-0001")
    assert [i.state for i in driver.core.status(driver.now).instances] == ["draining"]
    driver.now += 2.0
    assert [i.state for i in driver.core.status(driver.now).instances] == ["dead"]


def test_while_a_successor_is_launched_requests_wait_instead_of_being_refused() -> None:
    driver = Driver("a-0001")
    driver.wait(5.0)
    driver.drain("a-0001", hold_s=10.0)
    driver.down("a-0001")
    driver.wait(8.0)
    assert left(driver.drain("a-0001", hold_s=10.0)) == 0
    driver.wait(8.0)
    driver.admitted(only(driver.submit(), Admit))
    assert driver.request().state == "parked"
    assert only(driver.up("c-0001"), Reassign).owner == "c-0001"


def test_once_nobody_launches_one_any_more_they_are_refused() -> None:
    driver = Driver("a-0001")
    driver.wait(5.0)
    driver.drain("a-0001", hold_s=10.0)
    driver.down("a-0001")
    driver.wait(10.0)
    answer = only(driver.submit(), Reply).answer
    assert isinstance(answer, Refused)
    assert answer.code == "no_instance"


def test_a_promised_instance_is_taken_to_be_as_large_as_the_last() -> None:
    driver = Driver("a-0001")
    driver.drain("a-0001")
    driver.down("a-0001")
    answer = only(driver.submit(n_output=300), Reply).answer
    assert isinstance(answer, Refused)
    assert answer.code == "never_fits"


def test_a_policy_that_wanted_a_request_there_before_does_not_get_it() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.up("b-0001")
    (b,) = [i for i in driver.core.instances() if i.instance_id == "b-0001"]
    driver.core._advancing.decide(driver.now, [Move(driver.request(), b)])
    driver.drain("b-0001")
    effects = driver.result("a-0001", step=1, n_new=8, n_unmasked=8)
    assert every(effects, Reassign) == []
    assert item(effects, "a-0001").until_block == 1


def test_one_that_comes_back_from_the_dead_is_still_not_chosen() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.drain("a-0001", hold_s=60.0)
    driver.beats(4.0, "b-0001")
    joined = driver.beat("a-0001")
    assert any("joined" in e.text for e in every(joined, Log))
    assert only(driver.submit(), Admit).owner == "b-0001"


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    policy=st.sampled_from(sorted(POLICIES)),
    scheduler_dies=st.booleans(),
)
def test_whatever_is_lost_it_gets_empty_and_nothing_committed_is_lost(
    seed: int, loss: float, policy: str, scheduler_dies: bool
) -> None:
    """Under long requests and new ones, with room elsewhere, and with the scheduler dying."""
    world = World(seed=seed, loss=loss, n_workers=3, budget=2048, policy=policy)
    world.run_for(1.0)
    ids = [f"r{number}" for number in range(24)]
    for number, request_id in enumerate(ids):
        n_output = (BLOCK, 6 * BLOCK, 30 * BLOCK)[number % 3]
        world.at(number * 0.2, lambda i=request_id, n=n_output: world.submit(i, n_output=n))  # type: ignore[misc]
    world.run_for(2.0)
    world.drain_worker("w0", 60.0, goes=False)
    world.run_for(1.0)
    before = {i: committed(world, i) for i in ids}
    if scheduler_dies:
        world.crash_scheduler(1.0)
    gone = world.now + 50.0
    while world.now < gone and not is_empty(world):
        world.run_for(0.5)
    assert is_empty(world)
    assert all(committed(world, i)[: len(done)] == done for i, done in before.items())
    while world.now < gone + 300.0 and world.core is not None and world.core.requests():
        world.run_for(1.0)
    for request_id in ids:
        record, reply = world.record(request_id), world.replies.get(request_id)
        if isinstance(reply, Admitted):
            assert record is not None
            assert record.state == "done"


def committed(world: World, request_id: str) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Steps as they are stored."""
    if world.record(request_id) is None:
        return []
    deltas = call(world.store.deltas(request_id))
    return [(d.step, tuple(d.positions), tuple(d.tokens)) for d in deltas]


def is_empty(world: World) -> bool:
    """Whether the worker that is to be emptied holds nothing, as itself and as the core sees it."""
    if world.core is None:
        return False
    instance_id = world.workers["w0"].info.instance_id
    instances = [i for i in world.core.instances() if i.instance_id == instance_id]
    worker = world.workers["w0"]
    return bool(instances) and not instances[0].requests and not worker.held and not worker.wanted


@pytest.mark.parametrize("hold_s", [0.0, -1.0, 1e9])
def test_a_word_holds_for_a_sensible_time(hold_s: float) -> None:
    import msgspec

    from dilaserve.messages import encode
    from dilaserve.plan_messages import decode_drain

    with pytest.raises(msgspec.ValidationError):
        decode_drain(encode(Drain(instance_id="a-0001", hold_s=hold_s)))
