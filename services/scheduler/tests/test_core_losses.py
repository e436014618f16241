"""Instances that die, leave, or refuse; owners that change; requests that are poison."""

from __future__ import annotations

from typing import Any

import pytest

from dilaserve.messages import Refused
from dilaserve.store.records import FailAnswer, ReassignAnswer
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import (
    Admit,
    Ended,
    Fail,
    Load,
    RaiseTerm,
    Reassign,
    Reply,
    Send,
)
from dilaserve_scheduler.core.events import FailAnswered, ReassignAnswered, Recovered, TermRaised

from .driver import Driver, command, every, item, only, stored


def test_a_dead_instances_requests_move_with_their_step() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    driver.result("a-0001", step=1, n_new=3, n_unmasked=3)
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    assert (call.owner, call.expected_epoch, call.owner_died) == ("b-0001", 1, True)
    assert call.cause == "died"
    effects = driver.reassigned(call)
    sent = item(effects, "b-0001")
    assert (sent.epoch, sent.until_block) == (2, 1)
    assert only(effects, Send).first == ("r",)
    assert {i.instance_id: i.n_tokens for i in driver.core.instances()}["b-0001"] == 32


def test_a_restart_under_the_same_name_moves_them_at_once() -> None:
    driver = Driver("a-0001")
    driver.admit()
    call = only(driver.up("a-0002"), Reassign)
    assert (call.owner, call.owner_died) == ("a-0002", True)


def test_the_only_instance_is_waited_for() -> None:
    """Its silence proves nothing, and there is nowhere to go."""
    driver = Driver("a-0001")
    driver.admit()
    assert every(driver.beats(60.0), Reassign) == []
    assert item(driver.beat("a-0001"), "a-0001").epoch == 1


def test_one_that_leaves_on_purpose_is_not_held_against_its_requests() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    call = only(driver.down("a-0001"), Reassign)
    assert (call.owner, call.owner_died, call.cause) == ("b-0001", False, "left")


def test_when_the_last_one_leaves_they_are_parked_and_placed_when_one_comes() -> None:
    driver = Driver("a-0001")
    driver.admit()
    call = only(driver.down("a-0001"), Reassign)
    assert call.owner == ""
    assert driver.reassigned(call) == []
    assert driver.request().state == "parked"
    placed = only(driver.up("b-0001"), Reassign)
    assert (placed.owner, placed.expected_epoch, placed.cause) == ("b-0001", 2, "placed")
    assert item(driver.reassigned(placed), "b-0001").epoch == 3


def test_without_room_elsewhere_they_are_parked() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit("r1", n_prompt=200)
    driver.admit("r2", n_prompt=200)
    (call,) = every(driver.beats(2.25, "b-0001"), Reassign)
    assert (call.request_id, call.owner, call.owner_died) == ("r1", "", True)


def test_a_request_under_which_three_instances_died_fails() -> None:
    driver = Driver("a-0001")
    driver.admit()
    for death in (1, 2):
        call = only(driver.up(f"a-000{death + 1}"), Reassign)
        assert item(driver.reassigned(call, attempts=death), f"a-000{death + 1}")
    call = only(driver.up("a-0004"), Reassign)
    effects = driver.reassigned(call, attempts=3)
    fail = only(effects, Fail)
    assert fail.cause == "poison"
    assert "died 3 times" in fail.error
    assert every(effects, Send) == []
    repeat = only(driver.submit(), Reply).answer
    assert isinstance(repeat, Refused)
    assert repeat.code == "finished"
    ended = driver.give(FailAnswered(fail.op, "r", FailAnswer(outcome="failed")))
    assert ended == [Ended("r")]
    assert {i.instance_id: i.n_tokens for i in driver.core.instances()} == {"a-0004": 0}


def test_the_limit_of_attempts_is_a_setting() -> None:
    driver = Driver("a-0001", settings=CoreSettings(max_attempts=1))
    driver.admit()
    call = only(driver.up("a-0002"), Reassign)
    assert every(driver.reassigned(call, attempts=1), Fail)


def test_a_request_that_was_never_sent_is_innocent() -> None:
    """Its instance died between the admission and the command."""
    driver = Driver("a-0001", "b-0001")
    admit = only(driver.submit(), Admit)
    assert every(driver.beats(2.5, "b-0001"), Reassign) == []
    call = only(driver.admitted(admit), Reassign)
    assert (call.owner, call.owner_died, call.cause) == ("b-0001", False, "misplaced")


def test_its_new_instance_dying_before_it_arrives_does_not_count_either() -> None:
    driver = Driver("a-0001", "b-0001", "c-0001")
    driver.admit()
    first = only(driver.beats(2.25, "b-0001", "c-0001"), Reassign)
    assert first.owner == "b-0001"
    driver.beats(2.25, "c-0001")
    second = only(driver.reassigned(first), Reassign)
    assert (second.owner, second.owner_died, second.expected_epoch) == ("c-0001", False, 2)


@pytest.mark.parametrize("outcome", ["committed", "duplicate"])
def test_a_result_that_comes_late_from_the_dead_counts(outcome: str) -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    assert driver.result("a-0001", step=1, n_unmasked=3, outcome=outcome) == []  # type: ignore[arg-type]
    assert driver.request().step == 1
    ended = driver.result("a-0001", step=2, n_unmasked=24, finish="length")
    assert only(ended, Ended) == Ended("r")
    assert driver.core.requests() == []
    assert driver.core.requests() == []
    assert call.owner == "b-0001"


def test_answers_for_a_request_that_has_ended_are_ignored() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    stale = driver.request()
    driver.result("a-0001", step=2, n_unmasked=24, finish="length")
    driver.admit()  # the same id again, for the sake of the argument
    answer = ReassignAnswer(outcome="reassigned", epoch=2, owner="b-0001")
    assert driver.give(ReassignAnswered(call.op, "r", answer)) == []
    assert stale.state == "done"


# --- answers of reassign --------------------------------------------------------------------------


def displaced() -> tuple[Driver, Reassign]:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    return driver, only(driver.beats(2.25, "b-0001"), Reassign)


def test_a_conflict_that_shows_our_own_write_is_its_answer() -> None:
    driver, call = displaced()
    sent = item(driver.reassigned(call, "conflict", epoch=2, attempts=1), "b-0001")
    assert sent.epoch == 2
    assert driver.request().attempts == 1


def test_a_conflict_below_insists_above_both_and_still_counts_the_death() -> None:
    driver = Driver("b-0001")
    driver.give(Recovered((stored("r", epoch=5),)))
    call = only(driver.beats(2.25, "b-0001"), Reassign)
    assert call.expected_epoch == 5
    again = only(driver.reassigned(call, "conflict", epoch=3, owner="a-0001"), Reassign)
    assert (again.expected_epoch, again.min_epoch, again.owner_died) == (3, 6, True)
    assert item(driver.reassigned(again), "b-0001").epoch == 6


def test_a_conflict_with_another_owner_insists_and_counts_no_death() -> None:
    driver, call = displaced()
    again = only(driver.reassigned(call, "conflict", epoch=4, owner="x-0001"), Reassign)
    assert (again.expected_epoch, again.min_epoch, again.owner) == (4, 5, "b-0001")
    assert not again.owner_died


def test_a_terminal_record_ends_the_request() -> None:
    driver, call = displaced()
    assert only(driver.reassigned(call, "terminal"), Ended) == Ended("r")


@pytest.mark.parametrize("answer", [{"outcome": "missing"}, {"outcome": "conflict", "epoch": 0}])
def test_a_lost_admission_is_repeated_above_the_lost_epoch(answer: dict[str, Any]) -> None:
    driver, call = displaced()
    admit = only(driver.reassigned(call, **answer), Admit)
    assert (admit.owner, admit.min_epoch) == ("b-0001", 2)
    effects = driver.admitted(admit, epoch=2)
    assert every(effects, Reassign) == []
    assert item(effects, "b-0001").epoch == 2


def test_one_that_was_admitted_below_what_was_known_is_raised() -> None:
    driver, call = displaced()
    admit = only(driver.reassigned(call, "missing"), Admit)
    raised = only(driver.admitted(admit, "already", epoch=1), Reassign)
    assert (raised.expected_epoch, raised.min_epoch, raised.owner) == (1, 2, "b-0001")
    assert item(driver.reassigned(raised), "b-0001").epoch == 2


def test_a_record_that_is_gone_for_good_ends_the_request() -> None:
    driver, call = displaced()
    admit = only(driver.reassigned(call, "missing"), Admit)
    assert only(driver.admitted(admit, "missing", epoch=0), Ended) == Ended("r")


def test_a_stale_term_asks_for_a_higher_one_and_then_repeats_the_call() -> None:
    driver, call = displaced()
    assert driver.reassigned(call, "stale_term") == [RaiseTerm(1)]
    effects = driver.give(TermRaised(4))
    again = only(effects, Reassign)
    assert (again.owner, again.expected_epoch, again.owner_died) == ("b-0001", 1, True)
    assert again.op != call.op
    sent = command(driver.reassigned(again), "b-0001")
    assert (sent.term, sent.items[0].epoch) == (4, 2)


@pytest.mark.parametrize("kind", [Admit, Fail])
def test_other_calls_are_repeated_under_a_higher_term_too(kind: type) -> None:
    driver = Driver("a-0001", settings=CoreSettings(max_attempts=1))
    call = only(driver.submit(), Admit)
    if kind is Fail:
        driver.admitted(call)
        moved = only(driver.up("a-0002"), Reassign)
        fail = only(driver.reassigned(moved, attempts=1), Fail)
        answer = FailAnswered(fail.op, "r", FailAnswer(outcome="stale_term"))
        assert driver.give(answer) == [RaiseTerm(1)]
    else:
        assert driver.admitted(call, "stale_term") == [RaiseTerm(1)]
    assert only(driver.give(TermRaised(2)), kind)


def test_a_heartbeat_with_a_higher_term_asks_for_one_above() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert driver.beat("a-0001", term=9, seq=3) == [RaiseTerm(9)]


# --- what a worker will not run -------------------------------------------------------------------


def test_one_that_does_not_fit_is_tried_elsewhere_and_then_failed() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    call = only(driver.rejected("a-0001", "never_fits"), Reassign)
    assert (call.owner, call.cause, call.owner_died) == ("b-0001", "misplaced", False)
    driver.reassigned(call)
    fail = only(driver.rejected("b-0001", "never_fits", epoch=2), Fail)
    assert fail.cause == "never_fits"
    assert "so it is" in fail.error


def test_an_invalid_one_fails_with_the_workers_words() -> None:
    driver = Driver("a-0001")
    driver.admit()
    fail = only(driver.rejected("a-0001", "invalid"), Fail)
    assert fail.cause == "invalid"
    assert "so it is" in fail.error


@pytest.mark.parametrize("reason", ["unknown", "terminal", "fenced"])
def test_a_rejection_that_the_record_explains_has_it_read(reason: str) -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert only(driver.rejected("a-0001", reason), Load).request_ids == ("r",)


def test_rejections_of_another_epoch_or_instance_are_old_news() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.admit()
    assert driver.rejected("a-0001", "invalid", epoch=7) == []
    assert driver.rejected("b-0001", "invalid") == []


def test_a_fenced_commit_has_the_record_read() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert every(driver.result("a-0001", step=1, n_unmasked=1, outcome="fenced"), Load)
    assert driver.request().step == 0


def test_a_terminal_commit_ends_the_request() -> None:
    driver = Driver("a-0001")
    driver.admit()
    effects = driver.result("a-0001", step=1, n_unmasked=1, outcome="terminal")
    assert effects == [Ended("r")]
