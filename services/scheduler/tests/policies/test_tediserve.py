"""The paper's three algorithms, by hand. Latencies: see builders.profiles."""

from __future__ import annotations

import pytest

from dilaserve.messages import PredictSteps, StepAnswer, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Inquire, Retune
from dilaserve_scheduler.policies.tediserve import Tediserve

from .builders import advance, make_instance, make_request, options, result, seat

Stage = tuple[Tediserve, Instance, Request]


def stage(*, slo_s: float = 10.0, n_prompt: int = 184, **changes: object) -> Stage:
    """One request of n_prompt + 16 tokens, alone on an instance: 16 steps at 0.9, 8 at 0.5, two of
    them recompute steps of 20 ms (200 tokens), the others cache steps of 10 ms."""
    policy, instance = Tediserve(options(**changes)), make_instance(budget=1200)
    policy.joined(0.0, instance)
    request = make_request(n_prompt=n_prompt, slo_s=slo_s)
    assert policy.place(0.0, request) is instance
    seat(request, instance)
    policy.load_changed(0.0, instance)
    return policy, instance, request


def answer(request: Request, *steps: float) -> StepsPredicted:
    each = StepAnswer(
        request_id=request.request_id, step=request.step, p50=list(steps), upper=list(steps)
    )
    return StepsPredicted(model_id="m", thresholds=[0.5, 0.9], answers=[each])


@pytest.mark.parametrize(
    ("slo_s", "threshold"),
    [
        (0.19, 0.9),  # 2 × 20 + 14 × 10 = 180 ms
        (0.17, 0.5),  # 2 × 20 + 6 × 10 = 100 ms
        (0.09, 0.5),  # too late for any, so the lowest
    ],
)
def test_the_highest_threshold_that_meets_the_deadline(slo_s: float, threshold: float) -> None:
    policy, instance, request = stage(slo_s=slo_s)
    assert policy.threshold(0.0, request, instance) == threshold


def test_the_margin_and_the_time_since_arrival_count() -> None:
    policy, instance, request = stage(slo_s=0.3, margin=0.9)  # 270 ms
    assert policy.threshold(0.08, request, instance) == 0.9
    policy, instance, request = stage(slo_s=0.3, margin=0.9)
    assert policy.threshold(0.1, request, instance) == 0.5


def test_the_batch_is_priced_as_if_all_recomputed_together() -> None:
    policy, instance, request = stage(slo_s=0.27)
    seat(make_request("s", n_prompt=484), instance)  # 70 ms for both: 2 × 70 + 14 × 10 = 280
    assert policy.threshold(0.0, request, instance) == 0.5


def test_hopeless_is_who_would_be_late_alone_with_every_step_a_recompute_step() -> None:
    """0.7 × 8 × 20 ms = 112 ms: on the safe side of 100, by design."""
    policy, instance, request = stage()
    policy.threshold(0.0, request, instance)
    for slo_s, is_hopeless in ((0.113, False), (0.111, True)):
        request.slo_s = slo_s
        assert policy._is_hopeless(0.0, policy._plans["r"]) is is_hopeless


def test_a_quality_floor_holds() -> None:
    policy, instance, request = stage(slo_s=0.1)
    request.min_confidence = 0.7
    assert policy.threshold(0.0, request, instance) == 0.7


def test_predictions_age_by_a_step_and_thresholds_stay_until_something_changes() -> None:
    policy, instance, request = stage(slo_s=0.19)
    assert policy.threshold(0.0, request, instance) == 0.9
    advance(request, 1)
    assert list(policy.stepped(5.0, instance, result(instance, request), [request])) == []
    policy.load_changed(5.0, instance)  # somebody joined or left
    advance(request, 1)
    decisions = list(policy.stepped(5.1, instance, result(instance, request), [request]))
    assert decisions == [Retune(request, 0.5)]
    assert policy._plans["r"].steps == [6.0, 14.0]


def test_predictions_are_refreshed_after_so_many_tokens() -> None:
    policy, instance, request = stage(slo_s=0.27)
    policy.threshold(0.0, request, instance)
    advance(request, 8)
    step = result(instance, request, n_new=8)
    (inquiry,) = policy.stepped(0.0, instance, step, [request])
    assert isinstance(inquiry, Inquire)
    assert isinstance(inquiry.query, PredictSteps)
    assert policy.told(0.0, answer(request, 10.0, 30.0)) == ()
    assert policy._plans["r"].steps == [10.0, 30.0]
    advance(request, 1)
    # no recompute step is left: 29 × 10 = 290 ms at 0.9, 9 × 10 = 90 at 0.5
    decisions = policy.stepped(0.0, instance, result(instance, request), [request])
    assert list(decisions) == [Retune(request, 0.5)]


def test_an_answer_about_the_past_is_aged() -> None:
    policy, instance, request = stage()
    policy.threshold(0.0, request, instance)
    late = answer(request, 10.0, 30.0)
    advance(request, 1)
    policy.told(0.0, late)
    assert policy._plans["r"].steps == [9.0, 29.0]


def test_load_control_caps_in_order_of_arrival_and_takes_effect_at_a_refresh() -> None:
    """In 0.15 s an instance does 0.15 × (7 × 8 + 1,200) ÷ (7 × 10 ms + 120 ms) = 991 tokens. Each
    request needs 2 × 200 and 6 or 14 × 8: 448 or 512. One of them can have the higher threshold."""
    policy, instance, first = stage(slo_s=0.15)
    second = make_request("s", n_prompt=184, arrival_s=0.001, slo_s=0.15)
    policy.place(0.0, second)
    seat(second, instance)
    policy.load_changed(0.0, instance)
    for request in (first, second):
        policy.threshold(0.0, request, instance)
    assert policy._supply_tokens() == pytest.approx(991.6, abs=0.1)
    assert policy.tick(0.002) == ()
    assert [policy._plans[name].cap for name in "rs"] == [1, 0]
    assert policy.wake_at() == pytest.approx(1.002)
    advance(second, 1)
    assert list(policy.stepped(0.01, instance, result(instance, second), [second])) == []
    third = make_request("t")
    assert policy.threshold(0.01, third, None) == 0.5  # starts with the lowest cap given


def test_nobody_is_capped_while_there_is_capacity() -> None:
    policy, instance, request = stage(slo_s=10.0)
    policy.threshold(0.0, request, instance)
    policy.tick(1.0)
    assert policy._plans["r"].cap == 1


def test_parts_can_be_left_out() -> None:
    policy, instance, request = stage(slo_s=0.1, deadline_control=False)
    assert policy.threshold(0.0, request, instance) == 0.9
    policy, instance, request = stage(slo_s=0.3, load_control=False)
    policy.threshold(0.0, request, instance)
    policy.tick(1.0)
    assert policy._plans["r"].cap == 1


def test_it_forgets_what_has_ended() -> None:
    policy, instance, request = stage()
    policy.threshold(0.0, request, instance)
    policy.ended(1.0, request, finished=True)
    assert policy._plans == {}
    assert policy.wake_at() is None
