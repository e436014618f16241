"""Heartbeats against memory: what is missing is sent again, what is foreign is released."""

from __future__ import annotations

from dilaserve.messages import StepCommand
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import Effect, Fail, Load, Reassign, Send
from dilaserve_scheduler.core.events import Loaded

from .driver import Driver, command, every, item, only, stored


def sent(effects: list) -> list[StepCommand]:  # type: ignore[type-arg]
    return [send.command for send in every(effects, Send)]


def test_a_lost_command_is_sent_again_with_the_next_number() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.now += 0.5
    assert driver.beat("a-0001", seq=0) == []  # it may be on its way
    driver.now += 0.5
    again = command(driver.beat("a-0001", seq=0), "a-0001")
    assert (again.seq, again.items[0].request_id, again.items[0].epoch) == (2, "r", 1)


def test_the_traceparent_goes_along_until_the_request_is_seen() -> None:
    driver = Driver("a-0001", settings=CoreSettings(run_ahead=1))
    driver.admit()
    driver.now += 1.0
    assert only(driver.beat("a-0001"), Send).first == ("r",)
    driver.beat("a-0001", ("r", 1, 0))
    assert only(driver.result("a-0001", step=1, n_unmasked=1), Send).first == ()


def test_an_extension_that_did_not_arrive_is_sent_again() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.result("a-0001", step=1, n_new=6, n_unmasked=6)
    for step in (2, 3):
        driver.now += 0.5
        driver.result("a-0001", step=step, n_new=0, n_unmasked=6)
    assert driver.request().sent_seq == 2
    assert item(driver.beat("a-0001", ("r", 1, 3), seq=1), "a-0001").until_block == 1
    assert driver.beat("a-0001", ("r", 1, 3), seq=1) == []


def test_without_progress_the_credit_is_repeated_then_the_record_read() -> None:
    driver = Driver("a-0001")
    driver.admit()
    seen = []
    for _ in range(4):
        driver.now += 1.0
        effects = driver.beat("a-0001", ("r", 1, 0))
        seen.append("load" if every(effects, Load) else "send" if sent(effects) else "none")
    assert seen == ["send", "load", "send", "load"]


def test_slow_instances_are_given_time() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.result("a-0001", step=1, n_unmasked=1)
    driver.core.instances()[0].step_s = 2.0
    for _ in range(7):
        driver.now += 1.0
        assert driver.beat("a-0001", ("r", 1, 1)) == []
    driver.now += 1.0
    assert sent(driver.beat("a-0001", ("r", 1, 1)))


def test_a_lost_result_is_found_by_the_heartbeat() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.now += 0.5
    assert driver.beat("a-0001", ("r", 1, 5)) == []  # the result may be on its way
    driver.now += 0.5
    load = only(driver.beat("a-0001", ("r", 1, 5)), Load)
    record = stored("r", step=5, n_unmasked=9, block=1, n_block_masked=7)
    again = item(driver.give(Loaded(load.op, (record,))), "a-0001")
    assert again.until_block == 1
    assert driver.request().step == 5


def test_an_owner_ahead_of_a_store_that_lost_steps_may_write_its_canvas() -> None:
    """Its credit, reckoned from the store, is used up; with one more step it heals the store."""
    driver = Driver("a-0001", settings=CoreSettings(run_ahead=1))
    driver.admit()
    driver.now += 1.0
    load = only(driver.beat("a-0001", ("r", 1, 3)), Load)
    driver.give(Loaded(load.op, (stored("r"),)))
    driver.now += 1.0
    again = item(driver.beat("a-0001", ("r", 1, 3)), "a-0001")
    assert (again.until_step, again.until_block) == (4, 1)


def test_what_it_should_not_hold_is_released() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    (release,) = command(driver.beat("b-0001", ("r", 0, 0), ("x", 3, 1)), "b-0001").releases[1:]
    assert (release.request_id, release.epoch) == ("x", 3)
    assert driver.beat("a-0001", ("r", 1, 0)) == []


def test_two_owners_of_one_epoch_are_told_apart_by_a_higher_one() -> None:
    """Only after the store has lost writes, and the scheduler its memory."""
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    effects = driver.beat("b-0001", ("r", 4, 2))
    assert [r.epoch for r in command(effects, "b-0001").releases] == [4]
    call = only(effects, Reassign)
    assert (call.owner, call.cause, call.min_epoch) == ("a-0001", "fenced", 5)


def test_an_owner_at_a_higher_epoch_than_known_is_given_one_above() -> None:
    driver = Driver("a-0001")
    driver.admit()
    call = only(driver.beat("a-0001", ("r", 3, 2)), Reassign)
    assert (call.owner, call.expected_epoch, call.min_epoch) == ("a-0001", 1, 4)


def test_while_a_move_is_not_answered_neither_side_is_disturbed() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    assert driver.beat("b-0001", ("r", 2, 0)) == []
    assert item(driver.reassigned(call), "b-0001").epoch == 2


def heard_and_deaf(driver: Driver, seconds: float, deaf: str, *others: str) -> list[Effect]:
    """Time passes; `deaf` sends heartbeats, takes no command, and the store has nothing new."""
    effects: list[Effect] = []
    for _ in range(round(seconds / 0.25)):
        effects += driver.beats(0.25, *others)
        news = driver.beat(deaf, seq=0)
        for load in every(news, Load):
            news += driver.give(Loaded(load.op, (stored("r", owner=deaf),), ()))
        effects += news
    return effects


def test_an_owner_that_takes_no_command_loses_the_request_to_another() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    effects = heard_and_deaf(driver, 8.0, "a-0001", "b-0001")
    move = only(effects, Reassign)
    assert (move.owner, move.owner_died) == ("b-0001", False)
    driver.reassigned(move)
    driver.wait(60.0)
    assert driver.request().refused_by == {"a-0001"}


def test_where_there_is_no_other_it_fails_in_the_end() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert every(heard_and_deaf(driver, 20.0, "a-0001"), Fail) == []
    assert "a-0001 takes no commands" in only(heard_and_deaf(driver, 20.0, "a-0001"), Fail).error


def test_an_owner_that_is_held_up_by_another_request_is_not_deaf() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    for _ in range(100):
        driver.beats(0.25, "b-0001")
        for load in every(driver.beat("a-0001", ("another", 1, 3), seq=0), Load):
            driver.give(Loaded(load.op, (stored("r"),), ()))
    owner = driver.request().instance
    assert owner is not None
    assert owner.instance_id == "a-0001"


def test_while_the_store_is_away_nobody_is_deaf() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    for _ in range(200):
        driver.beats(0.25, "b-0001")
        assert every(driver.beat("a-0001", seq=0), Reassign) == []
