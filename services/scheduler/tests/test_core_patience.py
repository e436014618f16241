"""An admitted request does not wait for ever."""

from __future__ import annotations

import pytest

from dilaserve.store.records import FailAnswer
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import Effect, Ended, Fail, Reassign
from dilaserve_scheduler.core.events import ActiveListed, FailAnswered, Recovered

from .driver import Driver, every, item, only, stored

PATIENT = CoreSettings(queue_timeout_s=10.0)


def parked(settings: CoreSettings = PATIENT) -> Driver:
    """Request r waits, and nobody is there."""
    driver = Driver(settings=settings)
    driver.give(Recovered((stored("r", owner=""),)))
    return driver


def test_it_fails_when_its_time_is_over() -> None:
    driver = parked()
    assert driver.core.wake_at() is not None
    assert every(driver.wait(9.9), Fail) == []
    failed = only(driver.wait(0.1), Fail)
    assert (failed.request_id, failed.cause) == ("r", "timed_out")
    assert failed.error == (
        "no instance took the request within 10 s: none that lives takes its 32 tokens; "
        "start one that does"
    )
    effects = driver.give(FailAnswered(failed.op, "r", FailAnswer(outcome="failed")))
    assert only(effects, Ended) == Ended("r")
    assert driver.core.n_waiting == 0


def test_the_core_wakes_up_for_it() -> None:
    driver = parked(CoreSettings(queue_timeout_s=3.0))
    assert driver.core.wake_at() == pytest.approx(driver.now + 3.0)


def test_where_all_are_busy_it_says_so() -> None:
    driver = Driver("a-0001", settings=PATIENT)
    for number in range(9):  # room for eight
        driver.admit(f"r{number}")
    failed = only(driver.beats(10.25, "a-0001"), Fail)
    assert failed.request_id == "r8"
    assert "all that can run it were busy" in failed.error


def test_time_counts_from_the_last_time_that_it_began_to_wait() -> None:
    driver = parked()
    driver.wait(8.0)
    placed = only(driver.up("a-0001"), Reassign)
    assert item(driver.reassigned(placed), "a-0001").request_id == "r"
    driver.wait(1.0)
    driver.reassigned(only(driver.down("a-0001"), Reassign))
    assert driver.request().state == "parked"
    assert every(driver.wait(9.5), Fail) == []
    assert only(driver.wait(0.5), Fail).request_id == "r"


def test_it_is_patient_by_default() -> None:
    driver = parked(CoreSettings())
    assert every(driver.wait(1e6), Fail) == []


def listed(driver: Driver, seconds: float) -> list[Effect]:
    """Time passes in which nobody is heard, and the store lists request r every five seconds."""
    effects = []
    for _ in range(round(seconds / 5.0)):
        effects += driver.wait(5.0)
        effects += driver.give(ActiveListed(("r",)))
    return effects


def test_one_whose_owner_fell_silent_as_the_last_of_all_fails_too() -> None:
    driver = Driver("a-0001", settings=PATIENT)
    driver.admit()
    assert every(listed(driver, 10.0), Fail) == []  # heard since the tick before the first
    failed = only(listed(driver, 5.0), Fail)
    assert (failed.request_id, failed.cause) == ("r", "timed_out")
    assert failed.error == "no instance at all was heard for 10 s; start one, send it again"


def test_a_scheduler_that_stood_still_knows_nothing_of_the_others() -> None:
    driver = Driver("a-0001", settings=PATIENT)
    driver.admit()
    assert every(driver.wait(1000.0), Fail) == []
    driver.give(ActiveListed(("r",)))
    driver.beat("a-0001", ("r", 1, 0))
    assert every(listed(driver, 10.0), Fail) == []
