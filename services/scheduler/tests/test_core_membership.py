"""Who is live: heartbeats, silence, restarts under the same name."""

from __future__ import annotations

from typing import Any

import pytest

from dilaserve.messages import InstanceUp
from dilaserve_scheduler.core.effects import Admit, Log, Reassign
from dilaserve_scheduler.core.events import ActiveListed
from dilaserve_scheduler.core.membership import Members

from .driver import Driver, every, info, item, only


def members() -> Members:
    return Members(dead_after_s=2.0, gap_s=0.5)


def hear(tried: Members, now: float, *instance_ids: str) -> None:
    for instance_id in instance_ids:
        tried.hear(now, info(instance_id))


def dead(tried: Members) -> list[str]:
    return [instance.instance_id for instance in tried.take_dead()]


def test_silence_while_others_are_heard_is_death() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001", "b-0001")
    for n in range(1, 8):
        hear(tried, n * 0.25, "b-0001")
        assert dead(tried) == []
    hear(tried, 2.0, "b-0001")
    assert dead(tried) == ["a-0001"]
    assert dead(tried) == []
    assert tried.n_live == 1


def test_silence_of_all_proves_nothing() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001", "b-0001")
    hear(tried, 60.0, "b-0001")
    assert dead(tried) == []
    assert not tried.is_served("m", 62.0)
    hear(tried, 60.1, "a-0001")
    assert dead(tried) == []
    assert tried.is_served("m", 60.2)


def test_after_an_outage_the_silence_of_one_counts_anew() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001", "b-0001")
    for n in range(6):  # the first adds half a second only, though a minute has passed
        hear(tried, 60.0 + n * 0.25, "b-0001")
    assert dead(tried) == []
    hear(tried, 61.5, "b-0001")
    assert dead(tried) == ["a-0001"]


def test_a_step_result_is_a_sign_of_life() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001", "b-0001")
    for n in range(1, 20):
        hear(tried, n * 0.25, "b-0001")
        tried.touch(n * 0.25, "a-0001")
    assert dead(tried) == []


def test_one_taken_for_dead_comes_back() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001", "b-0001")
    for n in range(9):
        hear(tried, n * 0.25, "b-0001")
    assert dead(tried) == ["a-0001"]
    heard = tried.hear(5.0, info("a-0001"))
    assert heard is not None
    assert heard.joined
    assert tried.n_live == 2


def test_a_restart_under_the_same_name_is_death_at_once() -> None:
    tried = members()
    hear(tried, 0.0, "a-0001")
    heard = tried.hear(0.1, info("a-0002"))
    assert heard is not None
    assert [i.instance_id for i in heard.replaced] == ["a-0001"]


def test_a_late_message_does_not_bring_a_replaced_one_back() -> None:
    driver = Driver("a-0001")
    driver.up("a-0002")
    assert driver.beat("a-0001") == []
    assert [i.instance_id for i in driver.core.instances()] == ["a-0002"]


def test_if_the_replaced_one_is_heard_and_the_other_is_not_it_comes_back() -> None:
    """Then the first message of an incarnation that died young was overtaken."""
    driver = Driver("a-0002", "a-0001")
    driver.admit()
    assert driver.beats(1.75, "a-0002") == []
    driver.now += 0.25
    effects = driver.beat("a-0002")
    moved = only(effects, Reassign)
    assert (moved.owner, moved.cause) == ("a-0002", "died")


def test_two_workers_with_one_name_are_reported_once() -> None:
    driver = Driver("a-0001", "a-0002")
    logs = every(driver.beats(10.0, "a-0001", "a-0002"), Log)
    assert len(logs) == 1
    assert "DILASERVE_WORKER_NAME" in logs[0].text


def test_one_that_left_on_purpose_does_not_come_back() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.down("a-0001")
    driver.beats(10.0, "a-0001", "b-0001")
    assert [i.instance_id for i in driver.core.instances()] == ["b-0001"]


def test_the_largest_instance_of_a_model_is_known() -> None:
    tried = members()
    tried.hear(0.0, info("a-0001", max_batch_tokens=100))
    tried.hear(0.0, info("b-0001", max_batch_tokens=200))
    assert (tried.largest("m"), tried.largest("other")) == (200, 0)
    (b,) = [i for i in tried if i.name == "b"]
    tried.depart(0.0, b, on_purpose=True)
    assert tried.largest("m") == 100


def test_the_status_calls_a_silent_one_dead() -> None:
    driver = Driver("a-0001")
    driver.now += 1.0
    assert [i.state for i in driver.core.status(driver.now).instances] == ["live"]
    driver.now += 1.0
    (status,) = driver.core.status(driver.now).instances
    assert (status.state, status.heartbeat_age_s) == ("dead", 2.0)


def test_dead_instances_are_forgotten_after_a_minute() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.beats(3.0, "b-0001")
    assert {i.instance_id: i.state for i in driver.core.instances()} == {
        "a-0001": "dead",
        "b-0001": "live",
    }
    for _ in range(20):
        driver.beats(5.0, "b-0001")
        driver.give(ActiveListed(()))
    assert [i.instance_id for i in driver.core.instances()] == ["b-0001"]


def test_an_instance_that_returns_gets_numbers_above_those_it_has_seen() -> None:
    driver = Driver()
    driver.beat("a-0001", seq=41)
    driver.beat("a-0001", seq=41)
    effects = driver.admitted(only(driver.submit(), Admit))
    assert item(effects, "a-0001").request_id == "r"
    assert driver.core.instances()[0].seq == 42


@pytest.mark.parametrize(
    "change", [{"weights_hash": "other"}, {"cache_mode": "none"}, {"block_length": 4}]
)
def test_instances_of_one_model_that_differ_are_told_of(change: dict[str, Any]) -> None:
    driver = Driver()
    driver.up("a-0001")
    effects = driver.give(InstanceUp(info=info("b-0001", **change)))
    (warning,) = [e for e in every(effects, Log) if e.level == "warning"]
    assert "changes its course" in warning.text
    same = driver.give(InstanceUp(info=info("c-0001", model_id="another", **change)))
    assert [e for e in every(same, Log) if e.level == "warning"] == []
