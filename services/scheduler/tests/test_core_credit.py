"""Credits: absolute, per block or per step, numbered, and never more than progress calls for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilaserve_scheduler.core import CoreSettings, credit
from dilaserve_scheduler.core.effects import Ended, Send
from dilaserve_scheduler.core.model import Request

from .driver import Driver, command, every, item


def test_a_block_is_added_when_two_steps_are_left() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert driver.result("a-0001", step=1, n_new=2, n_unmasked=2) == []  # 6 left, 3 steps
    effects = driver.result("a-0001", step=2, n_new=2, n_unmasked=4)  # 4 left, 2 steps
    assert item(effects, "a-0001").until_block == 1
    assert driver.result("a-0001", step=3, n_new=2, n_unmasked=6) == []


def test_the_last_block_is_not_exceeded() -> None:
    driver = Driver("a-0001")
    driver.admit()
    effects = driver.result("a-0001", step=1, n_new=23, n_unmasked=23)
    assert item(effects, "a-0001").until_block == 2
    assert driver.result("a-0001", step=2, n_new=1, n_unmasked=24, finish="length") == [Ended("r")]


def test_a_block_that_ended_sooner_than_expected_is_followed_by_the_next() -> None:
    driver = Driver("a-0001")
    driver.admit()
    assert driver.result("a-0001", step=1, n_new=1, n_unmasked=1) == []
    assert item(driver.result("a-0001", step=2, n_new=7, n_unmasked=8), "a-0001").until_block >= 1


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_lock_step_counts_steps(run_ahead: int) -> None:
    driver = Driver("a-0001", settings=CoreSettings(run_ahead=run_ahead))
    assert item(driver.admit(), "a-0001").until_step == run_ahead
    sent = item(driver.result("a-0001", step=1, n_unmasked=1), "a-0001")
    assert sent.until_step == 1 + run_ahead


def test_commands_are_numbered_per_instance() -> None:
    driver = Driver("a-0001", "b-0001", term=7)
    numbers = [
        (send.instance_id, send.command.term, send.command.seq)
        for name in ("r1", "r2", "r3")
        for send in every(driver.admit(name), Send)
    ]
    assert numbers == [("a-0001", 7, 1), ("b-0001", 7, 1), ("a-0001", 7, 2)]


def test_one_event_sends_one_command_to_an_instance() -> None:
    driver = Driver("a-0001")
    driver.admit("r1")
    driver.admit("r2")
    driver.now += 10.0
    effects = driver.beat("a-0001", ("gone", 4, 1))  # both are missing there, and one is foreign
    sent = command(effects, "a-0001")
    assert {i.request_id for i in sent.items} == {"r1", "r2"}
    assert [(r.request_id, r.epoch) for r in sent.releases] == [("gone", 4)]


def test_news_of_an_old_step_change_nothing() -> None:
    driver = Driver("a-0001")
    driver.admit()
    driver.result("a-0001", step=2, n_new=4, n_unmasked=6)
    before = driver.request().step, driver.request().n_unmasked, driver.request().until_block
    assert driver.result("a-0001", step=1, n_new=2, n_unmasked=2) == []
    assert driver.result("a-0001", step=2, n_new=4, n_unmasked=6, outcome="duplicate") == []
    request = driver.request()
    assert (request.step, request.n_unmasked, request.until_block) == before


@given(
    n_output=st.integers(1, 60),
    run_ahead=st.sampled_from([None, 1, 2, 5]),
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=60),
)
def test_credit_never_shrinks_and_never_lacks_the_present_block(
    n_output: int, run_ahead: int | None, steps: list[int]
) -> None:
    request = Request("r", "m", n_prompt=1, n_output=n_output, block_length=8, arrival_s=0.0)
    credit.grant(request, run_ahead)
    for n_new in steps:
        before = request.until_block, request.until_step or 0
        n_new = min(n_new, request.n_block_masked)
        request.step += 1
        request.n_new, request.pace = n_new, n_new
        request.n_block_masked -= n_new
        if request.n_block_masked == 0 and request.block + 1 < request.n_blocks:
            request.block += 1
            request.n_block_masked = request.block_size(request.block)
        request.asked_block = request.block
        changed = credit.extend(request, run_ahead)
        after = request.until_block, request.until_step or 0
        assert changed == (after != before)
        assert after[0] >= before[0]
        assert after[1] >= before[1]
        assert request.block <= request.until_block < request.n_blocks
        assert request.until_block <= request.block + 1
        assert run_ahead is None or request.until_step == request.step + run_ahead
