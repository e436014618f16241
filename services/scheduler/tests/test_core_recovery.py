"""A new scheduler, a restarted store, and the comparison of both sides now and then."""

from __future__ import annotations

import pytest

from dilaserve_scheduler.core.effects import (
    Ended,
    Fail,
    ListActive,
    Load,
    Reassign,
    Send,
)
from dilaserve_scheduler.core.events import (
    ActiveListed,
    Loaded,
    Recovered,
    StoreRestarted,
    TermRaised,
)

from .driver import Driver, command, every, item, only, stored


def test_items_go_to_the_stored_owner_at_the_stored_epoch_once_it_is_heard() -> None:
    driver = Driver(term=2)
    records = (stored("r", epoch=3, step=4, n_unmasked=10, block=1, n_block_masked=6),)
    assert every(driver.give(Recovered(records)), Send) == []
    sent = command(driver.beat("a-0001", ("r", 3, 4), term=1, seq=9), "a-0001")
    assert (sent.term, sent.items[0].epoch, sent.items[0].until_block) == (2, 3, 1)
    assert driver.request().state == "running"


def test_an_owner_that_is_not_there_is_dead_after_a_while() -> None:
    driver = Driver("b-0001")
    driver.give(Recovered((stored("r"),)))
    assert every(driver.beats(1.75, "b-0001"), Reassign) == []
    call = only(driver.beats(0.5, "b-0001"), Reassign)
    assert (call.owner, call.expected_epoch, call.owner_died) == ("b-0001", 1, True)


def test_an_owner_that_was_restarted_meanwhile_is_dead_at_once() -> None:
    driver = Driver()
    driver.give(Recovered((stored("r"),)))
    assert only(driver.up("a-0002"), Reassign).owner == "a-0002"


def test_parked_ones_are_placed() -> None:
    driver = Driver()
    driver.give(Recovered((stored("r", epoch=2, owner=""),)))
    assert driver.core.n_waiting == 1
    call = only(driver.up("a-0001"), Reassign)
    assert (call.expected_epoch, call.cause, call.owner_died) == (2, "placed", False)


def test_poison_that_was_not_failed_yet_is_failed() -> None:
    driver = Driver()
    effects = driver.give(Recovered((stored("r", attempts=3),)))
    assert only(effects, Fail).cause == "poison"


def test_a_submission_repeated_after_the_takeover_is_answered() -> None:
    driver = Driver("a-0001")
    driver.give(Recovered((stored("r"),)))
    assert len(driver.submit()) == 1


# --- a restarted store ----------------------------------------------------------------------------


def test_all_epochs_are_raised_and_the_owners_stay() -> None:
    driver = Driver("a-0001")
    driver.admit("r1")
    driver.admit("r2", n_prompt=220)
    calls = every(driver.give(StoreRestarted()), Reassign)
    assert [(c.request_id, c.owner, c.expected_epoch, c.min_epoch) for c in calls] == [
        ("r1", "a-0001", 1, 2),
        ("r2", "", 1, 2),
    ]
    assert all(not c.owner_died and c.cause == "fenced" for c in calls)
    effects = driver.reassigned(calls[0])
    sent = command(effects, "a-0001")
    assert sent.items[0].epoch == 2
    assert sent.releases == []
    assert driver.core.instances()[0].n_tokens == 32


def test_the_store_may_be_behind_memory() -> None:
    driver = Driver("a-0001")
    driver.give(Recovered((stored("r", epoch=7),)))
    driver.beat("a-0001", ("r", 7, 0))
    call = only(driver.give(StoreRestarted()), Reassign)
    again = only(driver.reassigned(call, "conflict", epoch=4, owner="z-0001"), Reassign)
    assert (again.expected_epoch, again.min_epoch, again.owner) == (4, 8, "a-0001")


def test_steps_that_the_store_has_lost_are_forgotten() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.result("a-0001", step=3, n_new=3, n_unmasked=9)
    call = only(driver.give(StoreRestarted()), Reassign)
    load = only(driver.reassigned(call, step=1), Load)
    driver.give(Loaded(load.op, (stored("r", epoch=2, step=1, n_unmasked=3, n_block_masked=5),)))
    assert (driver.request().step, driver.request().block) == (1, 0)


def test_its_owner_dying_meanwhile_is_a_death() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    raised = only(driver.give(StoreRestarted()), Reassign)
    driver.beats(2.25, "b-0001")
    call = only(driver.reassigned(raised), Reassign)
    assert (call.owner, call.owner_died, call.expected_epoch) == ("b-0001", True, 2)


# --- now and then ---------------------------------------------------------------------------------


def test_the_active_set_is_read_every_few_seconds() -> None:
    driver = Driver("a-0001")
    assert driver.wait(4.9) == []
    assert driver.core.wake_at() == pytest.approx(1005.0)
    assert driver.wait(0.1) == [ListActive()]
    assert driver.core.wake_at() is None
    assert driver.wait(60.0) == []  # the answer is awaited
    driver.give(ActiveListed(()))
    assert driver.wait(5.0) == [ListActive()]


def test_what_one_side_does_not_know_is_read() -> None:
    driver = Driver("a-0001")
    driver.admit("r")
    load = only(driver.give(ActiveListed(("u",))), Load)
    assert load.request_ids == ("r", "u")
    effects = driver.give(Loaded(load.op, (stored("u", epoch=4),), absent=("r",)))
    assert only(effects, Ended) == Ended("r")
    assert item(effects, "a-0001").epoch == 4


def test_when_both_agree_nothing_is_read() -> None:
    driver = Driver("a-0001")
    driver.admit("r")
    assert driver.give(ActiveListed(("r",))) == []


def test_an_unknown_one_that_has_ended_since_is_left_alone() -> None:
    driver = Driver("a-0001")
    load = only(driver.give(ActiveListed(("u",))), Load)
    assert driver.give(Loaded(load.op, (stored("u", state="done"),))) == []
    assert driver.core.requests() == []


@pytest.mark.parametrize("state", ["done", "cancelled", "failed"])
def test_an_ended_record_ends_the_request(state: str) -> None:
    driver = Driver("a-0001")
    driver.admit()
    load = only(driver.give(ActiveListed(())), Load)
    effects = driver.give(Loaded(load.op, (stored("r", state=state),)))
    assert only(effects, Ended) == Ended("r")
    assert command(effects, "a-0001").releases[0].request_id == "r"


def test_a_record_read_before_a_move_is_too_old() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    load = only(driver.give(ActiveListed(())), Load)
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    driver.reassigned(call)
    assert driver.give(Loaded(load.op, (stored("r", epoch=1, state="done"),))) == []
    assert driver.request().epoch == 2


def test_a_record_with_another_owner_is_overruled() -> None:
    driver = Driver("a-0001")
    driver.admit()
    load = only(driver.give(ActiveListed(())), Load)
    call = only(driver.give(Loaded(load.op, (stored("r", epoch=2, owner="z-0001"),))), Reassign)
    assert (call.owner, call.expected_epoch, call.min_epoch) == ("a-0001", 2, 3)


def test_a_record_that_agrees_is_not_answered_at_once_again() -> None:
    driver = Driver("a-0001")
    driver.admit()
    load = only(driver.rejected("a-0001", "fenced"), Load)
    assert driver.give(Loaded(load.op, (stored("r"),))) == []  # sent just now
    driver.now += 0.3
    load = only(driver.rejected("a-0001", "fenced"), Load)
    assert item(driver.give(Loaded(load.op, (stored("r"),))), "a-0001").epoch == 1


def test_a_higher_term_has_everything_checked() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert only(driver.give(TermRaised(5)), Load).request_ids == ("r",)
    assert driver.core.term == 5
