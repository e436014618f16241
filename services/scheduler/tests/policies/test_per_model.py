"""A policy for each model: what one learns says nothing of another."""

from __future__ import annotations

import pytest

from dilaserve.messages import StepAnswer, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import build_policy
from dilaserve_scheduler.policies.per_model import PerModel

from .builders import make_instance, make_request, options, result, seat


def start(policy: Policy, model_id: str, number: int) -> tuple[Request, Instance]:
    instance = make_instance(number, budget=64)
    instance.model_id = model_id
    policy.joined(0.0, instance)
    request = make_request(f"{model_id}-{number}", model_id=model_id, slo_s=2.0)
    assert policy.place(0.0, request) is instance
    seat(request, instance)
    policy.load_changed(0.0, instance)
    request.threshold = policy.threshold(0.0, request, instance)
    return request, instance


@pytest.mark.parametrize("name", ["dilaserve", "tediserve"])
def test_what_the_passes_of_one_model_take_prices_no_other(name: str) -> None:
    """Without a profile: passes of 100 ms are assumed, 16 of which are in time."""
    policy = build_policy(name, options(profiles=None, overhead=None, risk_aware=False))
    assert isinstance(policy, PerModel)
    slow, instance = start(policy, "slow", 1)
    other, others = start(policy, "other", 2)
    assert (slow.threshold, other.threshold) == (0.9, 0.9)
    for n in range(200):
        done = result(instance, make_request(f"o{n}"), latency_ms=300.0)
        policy.stepped(0.0, instance, done, [])
    assert policy.threshold(0.0, slow, instance) == 0.5
    assert policy.threshold(0.0, other, others) == 0.9


def test_predictions_go_to_their_model() -> None:
    policy = build_policy("dilaserve", options(risk_aware=False))
    assert isinstance(policy, PerModel)
    request, instance = start(policy, "a", 1)
    each = StepAnswer(request_id=request.request_id, step=0, p50=[8, 400], upper=[8, 400])
    for model_id in ("b", "a"):
        told = StepsPredicted(model_id=model_id, thresholds=[0.5, 0.9], answers=[each])
        policy.told(0.0, told)
        chosen = policy.threshold(0.0, request, instance)
        assert chosen == (0.9 if model_id == "b" else 0.5)
    assert policy.told(0.0, "something else") == []


def test_each_model_wakes_for_itself() -> None:
    policy = build_policy("dilaserve", options())
    assert policy.wake_at() is None
    a, _ = start(policy, "a", 1)
    assert policy.wake_at() == 0.0
    assert list(policy.tick(0.0)) == []
    b, _ = start(policy, "b", 2)
    assert policy.wake_at() == 0.0  # of b
    policy.tick(0.1)
    assert policy.wake_at() == 0.25  # of a
    policy.ended(0.2, a, finished=True)
    assert policy.wake_at() == pytest.approx(0.35)
    policy.ended(0.2, b, finished=True)
    assert policy.wake_at() is None
