"""Submissions: admitted, parked, refused, repeated, cancelled."""

from __future__ import annotations

import pytest

from dilaserve.messages import Admitted, Cancel, Cancelled, Refused
from dilaserve.store.records import FailAnswer
from dilaserve_scheduler.core.effects import Admit, Ended, Fail, Reassign, Reply, Send
from dilaserve_scheduler.core.events import FailAnswered
from dilaserve_scheduler.policies import PolicyOptions, build_policy

from .driver import Driver, command, every, item, only


def refusal(effects: list) -> Refused:  # type: ignore[type-arg]
    answer = only(effects, Reply).answer
    assert isinstance(answer, Refused)
    return answer


def test_a_request_is_admitted_then_answered_then_commanded() -> None:
    driver = Driver("a-0001")
    assert driver.submit() == [Admit(1, "r", "a-0001")]
    effects = driver.admitted(Admit(1, "r", "a-0001"))
    answer = only(effects, Reply).answer
    assert isinstance(answer, Admitted)
    assert answer.threshold == 0.9
    assert answer.predicted_finish_s > 0
    sent = item(effects, "a-0001")
    assert (sent.epoch, sent.threshold, sent.until_block, sent.until_step) == (1, 0.9, 0, None)
    assert command(effects, "a-0001").seq == 1
    assert only(effects, Send).first == ("r",)


def test_a_quality_floor_is_kept() -> None:
    driver = Driver("a-0001")
    assert item(driver.admit(min_confidence=0.97), "a-0001").threshold == 0.97
    assert item(driver.admit("s", min_confidence=0.5), "a-0001").threshold == 0.9


def test_a_submission_is_idempotent() -> None:
    driver = Driver("a-0001")
    call = only(driver.submit(), Admit)
    assert driver.submit() == []
    first = only(driver.admitted(call), Reply)
    assert driver.submit() == [first]
    assert driver.admitted(call) == []


def test_least_loaded_first() -> None:
    driver = Driver("a-0001", "b-0001")
    owners = [only(driver.submit(f"r{n}", n_prompt=8 * n + 8), Admit).owner for n in range(4)]
    assert owners == ["a-0001", "b-0001", "a-0001", "b-0001"]


def test_without_an_instance_it_is_refused_after_the_start() -> None:
    driver = Driver()
    assert driver.submit() == []
    assert driver.core.wake_at() == pytest.approx(1002.0)
    answer = refusal(driver.wait(2.0))
    assert (answer.code, answer.retry_after_s) == ("no_instance", 5.0)
    assert refusal(driver.submit()).code == "no_instance"


def test_an_early_submission_waits_for_the_first_instance() -> None:
    driver = Driver()
    driver.submit()
    driver.now += 1.0
    assert only(driver.up("a-0001"), Admit).owner == "a-0001"


def test_an_early_submission_can_be_cancelled() -> None:
    driver = Driver()
    driver.submit()
    answers = [r.answer for r in every(driver.give(Cancel(request_id="r")), Reply)]
    assert [type(a) for a in answers] == [Cancelled, Refused]
    assert every(driver.up("a-0001"), Admit) == []


def test_another_model_is_not_served() -> None:
    driver = Driver("a-0001")
    driver.now += 3.0
    driver.beat("a-0001")
    answer = refusal(driver.submit(model_id="other"))
    assert answer.code == "no_instance"
    assert "'other'" in answer.reason


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_sequence_length": 100}, "(the model's length)"),
        ({"n_kv_tokens": 100}, "(its KV pool, DILASERVE_KV_TOKENS)"),
        ({"max_batch_tokens": 100}, "(its DILASERVE_MAX_BATCH_TOKENS)"),
    ],
)
def test_what_fits_no_live_instance_is_refused_for_ever(limits: dict[str, int], name: str) -> None:
    driver = Driver()
    driver.up("a-0001", **limits)
    answer = refusal(driver.submit(n_prompt=80))
    assert (answer.code, answer.retry_after_s) == ("never_fits", None)
    assert f"are 104, and the largest live instance takes 100 {name}; shorten" in answer.reason
    assert every(driver.submit("s", n_prompt=76), Admit)


def test_an_instance_without_a_cache_has_no_kv_limit() -> None:
    driver = Driver()
    driver.up("a-0001", n_kv_tokens=0, cache_mode="none")
    assert only(driver.submit(n_prompt=200), Admit).owner == "a-0001"


@pytest.mark.parametrize("field", ["n_prompt", "n_output", "block_length"])
def test_nonsense_is_refused(field: str) -> None:
    answer = refusal(Driver("a-0001").submit("r", **{field: 0}))
    assert answer.code == "never_fits"
    assert f"{field}=0" in answer.reason


def test_without_room_it_is_parked_and_placed_in_order() -> None:
    driver = Driver("a-0001")
    driver.admit("r1", n_prompt=200)
    for name in ("r2", "r3"):
        driver.now += 0.5
        effects = driver.admit(name, n_prompt=100)
        answer = only(effects, Reply).answer
        assert isinstance(answer, Admitted)
        assert answer.predicted_finish_s > 0
        assert every(effects, Send) == []
        assert driver.request(name).state == "parked"
    assert driver.core.n_waiting == 2
    effects = driver.result("a-0001", "r1", step=1, n_unmasked=24, finish="length")
    placed = every(effects, Reassign)
    assert [(p.request_id, p.owner, p.cause) for p in placed] == [
        ("r2", "a-0001", "placed"),
        ("r3", "a-0001", "placed"),
    ]
    sent = item(driver.reassigned(placed[0]), "a-0001")
    assert (sent.request_id, sent.epoch) == ("r2", 2)


def test_the_head_of_the_line_holds_up_the_rest() -> None:
    driver = Driver("a-0001")
    driver.admit("r1", n_prompt=100)
    driver.now += 0.5
    driver.admit("big", n_prompt=200)
    driver.now += 0.5
    effects = driver.admit("small", n_prompt=8)
    assert every(effects, Reassign) == []
    assert driver.request("small").state == "parked"


def test_one_that_no_live_instance_can_run_is_passed_over() -> None:
    driver = Driver("a-0001", "b-0001")
    driver.up("c-0001", max_batch_tokens=1000, n_kv_tokens=1000, max_sequence_length=1000)
    driver.admit("huge", n_prompt=500)
    parked = only(driver.down("c-0001"), Reassign)
    assert parked.owner == ""
    driver.reassigned(parked)
    assert driver.request("huge").state == "parked"
    assert only(driver.submit("small"), Admit).owner == ""  # behind it, at first
    effects = driver.admitted(Admit(driver.request("small").call.op, "small", ""))  # type: ignore[union-attr]
    assert only(effects, Reassign).owner in ("a-0001", "b-0001")
    back = driver.up("d-0001", max_batch_tokens=1000, n_kv_tokens=1000, max_sequence_length=1000)
    assert only(back, Reassign).request_id == "huge"


def test_too_many_waiting_are_refused_with_an_honest_time() -> None:
    driver = Driver("a-0001", policy=build_policy("infaas", PolicyOptions(queue_limit=2)))
    driver.admit("r0", n_prompt=200)
    driver.now += 10.0
    driver.result("a-0001", "r0", step=1, n_unmasked=24, finish="length")
    driver.admit("r1", n_prompt=200)  # 224 tokens in 10 s: 22.4 tokens a second
    driver.admit("r2", n_prompt=200)
    driver.admit("r3", n_prompt=200)
    answer = refusal(driver.submit("r4"))
    assert answer.code == "overloaded"
    assert answer.retry_after_s == pytest.approx(2 * 224 / 22.4, rel=0.2)


@pytest.mark.parametrize(("outcome", "code"), [("missing", "unknown"), ("terminal", "finished")])
def test_what_the_store_does_not_admit_is_refused(outcome: str, code: str) -> None:
    driver = Driver("a-0001")
    effects = driver.admitted(only(driver.submit(), Admit), outcome)
    assert refusal(effects).code == code
    assert only(effects, Ended) == Ended("r")
    assert driver.core.requests() == []
    assert driver.core.instances()[0].n_tokens == 0


def test_admitted_before_by_another_scheduler_it_stays_where_it_is() -> None:
    driver = Driver("a-0001", "b-0001")
    effects = driver.admitted(only(driver.submit(), Admit), "already", epoch=3, owner="b-0001")
    assert isinstance(only(effects, Reply).answer, Admitted)
    assert item(effects, "b-0001").epoch == 3
    loads = {i.instance_id: i.n_tokens for i in driver.core.instances()}
    assert loads == {"a-0001": 0, "b-0001": 32}


def test_cancelling_releases_at_once() -> None:
    driver = Driver("a-0001")
    driver.admit()
    effects = driver.give(Cancel(request_id="r"))
    assert only(effects, Reply).answer == Cancelled(request_id="r", known=True)
    (release,) = command(effects, "a-0001").releases
    assert (release.request_id, release.epoch) == ("r", 1)
    assert driver.core.requests() == []
    assert driver.core.instances()[0].n_tokens == 0


def test_cancelling_what_is_not_known() -> None:
    effects = Driver("a-0001").give(Cancel(request_id="r"))
    assert effects == [Reply("r", Cancelled(request_id="r", known=False))]


def test_cancelled_while_being_admitted_it_is_not_run() -> None:
    driver = Driver("a-0001")
    call = only(driver.submit(), Admit)
    assert [type(r.answer) for r in every(driver.give(Cancel(request_id="r")), Reply)] == [
        Cancelled,
        Refused,
    ]
    assert refusal(driver.submit()).code == "finished"
    effects = driver.admitted(call)
    fail = only(effects, Fail)
    assert fail.cause == "cancelled"
    assert every(effects, Send) == []
    assert driver.give(FailAnswered(fail.op, "r", FailAnswer(outcome="terminal"))) == [Ended("r")]


def test_cancelled_while_parked_it_leaves_the_line() -> None:
    driver = Driver("a-0001")
    driver.admit("r1", n_prompt=200)
    driver.admit("r2", n_prompt=200)
    driver.give(Cancel(request_id="r2"))
    assert driver.core.n_waiting == 0
    effects = driver.result("a-0001", "r1", step=1, n_unmasked=24, finish="length")
    assert every(effects, Reassign) == []
