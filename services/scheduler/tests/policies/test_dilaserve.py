"""Our policy over the port, by hand. A pass of up to 100 tokens takes 10 ms (builders.profiles)."""

from __future__ import annotations

from typing import Any

import pytest

from dilaserve.messages import PredictSteps, StepAnswer, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Inquire, Requeue, Retune, Shelve
from dilaserve_scheduler.policies.dilaserve import Dilaserve

from .builders import advance, make_instance, make_request, options, result, seat


class Stage:
    """Instances with room for two requests of 32 tokens."""

    def __init__(self, n_instances: int = 1, **changes: Any) -> None:
        self.policy = Dilaserve(options(**({"risk_aware": False} | changes)))
        self.instances = [make_instance(n, budget=64) for n in range(n_instances)]
        for instance in self.instances:
            self.policy.joined(0.0, instance)

    def start(self, name: str = "r", *, now: float = 0.0, **changes: Any) -> Request:
        """Have a request placed, and run."""
        request = make_request(name, **changes)
        instance = self.policy.place(now, request)
        assert instance is not None
        seat(request, instance)
        self.policy.load_changed(now, instance)
        request.threshold = self.policy.threshold(now, request, instance)
        return request

    def park(self, name: str, *, now: float = 0.0, **changes: Any) -> Request:
        """Have a request wait."""
        request = make_request(name, **changes)
        self.policy.threshold(now, request, None)
        self.policy.parked(now, request)
        return request

    def step(self, now: float, request: Request, n_new: int = 1) -> list[Any]:
        """A pass with the request alone."""
        instance = request.instance
        assert instance is not None
        advance(request, n_new)
        done = result(instance, request, n_new=n_new)
        return list(self.policy.stepped(now, instance, done, [request]))


def answer(request: Request, p50: list[float], upper: list[float]) -> StepsPredicted:
    each = StepAnswer(request_id=request.request_id, step=request.step, p50=p50, upper=upper)
    return StepsPredicted(model_id="m", thresholds=[0.5, 0.9], answers=[each])


@pytest.mark.parametrize(
    ("slo_s", "threshold"),
    [
        (0.17, 0.9),  # 16 steps of 10 ms
        (0.15, 0.5),  # 8 steps
        (0.05, 0.5),  # too late for any
    ],
)
def test_the_highest_threshold_that_meets_the_deadline(slo_s: float, threshold: float) -> None:
    assert Stage().start(slo_s=slo_s).threshold == threshold


@pytest.mark.parametrize(
    ("delivery_s", "threshold"),
    [
        (0.0, 0.9),  # 16 steps of 10 ms
        (0.005, 0.9),
        (0.02, 0.5),  # a tenth of the SLO is kept free, which leaves 153 ms
    ],
)
def test_time_to_deliver_the_answer_is_kept_free(delivery_s: float, threshold: float) -> None:
    request = Stage(delivery_s=delivery_s).start(slo_s=0.17)
    assert request.threshold == threshold


def test_the_batch_that_will_run_is_priced() -> None:
    """A big request beside it, of which a tenth of the passes recompute 632 tokens: slower than
    alone, and far from as slow as if all recomputed together."""
    stage = Stage()
    (instance,) = stage.instances
    instance.token_budget = instance.capacity = 1000
    alone = stage.start("alone", slo_s=0.3)
    assert alone.threshold == 0.9
    stage.start("big", n_prompt=616)
    mixed_s = float(stage.policy._pass_s(instance))
    assert 0.010 < mixed_s < 0.5 * 0.0664
    for course in stage.policy._ledger.courses.values():
        course.current = 1
    chosen = stage.policy.threshold(0.0, alone, instance)
    assert chosen == (0.9 if 16 * mixed_s <= 0.3 else 0.5)


def test_thresholds_follow_slack_at_every_step_and_go_back_with_reserve() -> None:
    stage = Stage()
    request = stage.start(slo_s=0.17)
    assert stage.step(0.005, request) == []  # 15 steps in 165 ms
    assert stage.step(0.05, request) == [Retune(request, 0.5)]  # 14 in 120
    assert stage.step(0.05, request, n_new=2) == []  # 12 in 120: fits, but without reserve
    assert stage.step(0.05, request, n_new=1) == [Retune(request, 0.9)]  # 11 in 120


@pytest.mark.parametrize(
    ("parts", "threshold"),
    [
        ({"risk_aware": False, "load_control": False}, 0.9),
        ({"risk_aware": True, "load_control": False}, 0.5),
        ({"risk_aware": True}, 0.9),  # nobody else is there: it can be made faster later
    ],
)
def test_the_risk_is_an_upper_quantile(parts: dict[str, bool], threshold: float) -> None:
    stage = Stage(**parts)
    request = stage.start(slo_s=0.17)
    stage.policy.told(0.0, answer(request, [8, 16], [10, 18]))
    assert stage.policy.threshold(0.0, request, stage.instances[0]) == threshold


def test_predictions_are_asked_for_and_taken_with_the_progress_they_were_made_for() -> None:
    stage = Stage()
    request = stage.start(slo_s=0.2)
    (inquiry,) = stage.step(0.0, request, n_new=8)
    assert isinstance(inquiry, Inquire)
    assert isinstance(inquiry.query, PredictSteps)
    asked = answer(request, [8, 24], [8, 24])
    stage.step(0.0, request, n_new=2)
    assert stage.policy.told(0.0, asked) == []
    # 24 steps were left of 8 tokens, 18 are of 6: 180 ms, of 160 that are left then
    assert stage.step(0.04, request, n_new=0) == [Retune(request, 0.5)]
    stage.policy.told(0.0, answer(make_request("gone"), [1, 1], [1, 1]))
    stage.policy.told(0.0, "something else")


def arrivals_asked_about(stage: Stage, now: float) -> list[str]:
    inquiries = [each for each in stage.policy.tick(now) if isinstance(each, Inquire)]
    queries = [each.query for each in inquiries if isinstance(each.query, PredictSteps)]
    return [question.request_id for query in queries for question in query.questions]


def test_of_an_unknown_model_the_first_to_arrive_are_asked_about() -> None:
    """Half a step a token and one are assumed; the predictor says a fourth and a half of that."""
    stage = Stage(is_guess=True)
    request = stage.start(slo_s=0.1)
    assert request.threshold == 0.5  # 8 steps of 10 ms, where 0.9 would need 16
    assert arrivals_asked_about(stage, 0.0) == ["r"]
    assert stage.policy.told(0.0, answer(request, [2, 8], [3, 9])) == [Retune(request, 0.9)]
    (instance,) = stage.instances
    del instance.requests["r"]
    assert stage.start("next", slo_s=0.1).threshold == 0.9  # as was said of the first
    assert arrivals_asked_about(Stage(), 0.0) == []


def test_who_waits_for_the_store_is_not_retuned_but_at_its_first_step() -> None:
    stage = Stage(is_guess=True)
    request = stage.start(slo_s=0.1)
    arrivals_asked_about(stage, 0.0)
    request.state = "submitting"
    assert stage.policy.told(0.0, answer(request, [2, 8], [3, 9])) == []
    request.state = "running"
    assert stage.step(0.0, request) == [Retune(request, 0.9)]


def test_one_that_has_run_meanwhile_is_not_asked_about_as_if_it_had_just_come() -> None:
    stage = Stage(is_guess=True)
    request = stage.start()
    advance(request, 2)
    assert arrivals_asked_about(stage, 0.0) == []


def test_once_enough_was_seen_nobody_is_asked_about_at_arrival() -> None:
    """What ends early is learned as what it took in all: two steps for 16 tokens."""
    stage = Stage(is_guess=True)
    (instance,) = stage.instances
    for n in range(150):
        request = stage.start(f"r{n}")
        stage.step(0.0, request, n_new=2)
        request.step += 1  # the last step, which is in no result of those that go on
        stage.policy.ended(0.0, request, finished=True)
        instance.requests.clear()
        instance.n_tokens = 0
        stage.policy.load_changed(0.0, instance)
    stage.policy.tick(0.0)
    assert stage.policy._habits.steps_per_token[1] == pytest.approx(2 / 16, rel=0.3)
    stage.start("last")
    assert arrivals_asked_about(stage, 0.0) == []


def test_whose_last_step_was_reported_leaves_nothing_behind() -> None:
    stage = Stage()
    request = stage.start()
    stage.policy.ended(0.0, request, finished=True)
    stage.policy.stepped(0.0, stage.instances[0], result(stage.instances[0], request), [])
    assert stage.policy._habits._courses == {}


def test_a_quality_floor_holds_and_may_lie_between_candidates() -> None:
    stage = Stage()
    assert stage.start(slo_s=0.05, min_confidence=0.7).threshold == 0.9
    assert stage.start("s", slo_s=0.05, min_confidence=0.95).threshold == 0.95


def test_a_new_level_holds_from_the_next_step_on() -> None:
    stage = Stage(deadline_control=True)
    request = stage.start(slo_s=10.0)
    assert request.threshold == 0.9
    for n in range(40):
        stage.park(f"w{n}", slo_s=0.4)
    assert list(stage.policy.tick(0.0)) == []
    assert stage.step(0.01, request) == [Retune(request, 0.5)]


def test_a_new_level_may_wait_for_the_next_predictions_or_for_another_batch() -> None:
    for sign in ("predictions", "batch"):
        stage = Stage(caps_at_next_step=False)
        request = stage.start(slo_s=10.0)
        for n in range(40):
            stage.park(f"w{n}", slo_s=0.4)
        stage.policy.tick(0.0)
        assert stage.step(0.01, request) == []
        if sign == "predictions":
            stage.policy.told(0.01, answer(request, [8, 16], [8, 16]))
        else:
            stage.policy.load_changed(0.01, stage.instances[0])
        assert stage.step(0.02, request) == [Retune(request, 0.5)]


def test_unmixed_prices_are_the_papers() -> None:
    """Two blocks' recompute steps over 616 + 16 + 32 tokens, and 14 cache steps of 10 ms."""
    stage = Stage(mixed_batches=False)
    (instance,) = stage.instances
    instance.token_budget = instance.capacity = 1000
    alone = stage.start("alone", slo_s=10.0)
    stage.start("big", n_prompt=616)
    assert stage.policy.predict_finish_s(0.0, alone) == pytest.approx(2 * 0.0664 + 14 * 0.010)


def test_priority_then_deadline_then_the_hopeless() -> None:
    stage = Stage()
    stage.start("r")
    stage.start("s")
    late = stage.park("late", slo_s=0.04)
    soon = stage.park("soon", slo_s=1.0)
    later = stage.park("later", slo_s=2.0)
    high = stage.park("high", slo_s=9.0, priority=1)
    rank = stage.policy.rank
    assert sorted([later, soon, high, late], key=rank) == [high, late, soon, later]
    assert list(stage.policy.tick(0.0)) == [Requeue(late)]
    assert sorted([later, soon, high, late], key=rank) == [high, soon, later, late]
    assert list(stage.policy.tick(0.25)) == []


def test_the_longer_of_two_with_one_deadline_starts_first() -> None:
    """Once it is known what a pass takes: 64 tokens need 32 steps at least, 16 need eight."""
    stage = Stage()
    stage.start("r")
    stage.policy.tick(0.0)
    short = stage.park("short", slo_s=2.0)
    longer = stage.park("longer", slo_s=2.0, n_output=64)
    much_later = stage.park("later", slo_s=3.0, n_output=64)
    assert sorted([much_later, short, longer], key=stage.policy.rank) == [longer, short, much_later]


def late(stage: Stage, *, waits: bool) -> list[Any]:
    """What is done about a request that needs 110 ms, twice what is left of its SLO."""
    stage.start("s")
    request = stage.start("r", slo_s=0.1)
    for n in range(40 * waits):  # so many that even the lowest thresholds are not enough
        stage.park(f"w{n}", slo_s=0.4)
    stage.policy.tick(0.0)
    stage.step(0.05, request)
    stage.policy.told(0.05, answer(request, [11, 16], [12, 18]))
    return stage.step(0.05, request, n_new=0)


def test_who_will_surely_be_late_makes_room_for_one_who_waits() -> None:
    stage = Stage()
    (decision,) = [d for d in late(stage, waits=True) if isinstance(d, Shelve)]
    request = decision.request
    assert request.request_id == "r"
    assert not [d for d in stage.step(0.06, request) if isinstance(d, Shelve)]  # said once
    stage.policy.parked(0.07, request)
    assert stage.policy.rank(request) > stage.policy.rank(stage.park("x", slo_s=9.0))


def test_who_will_be_late_goes_on_where_that_helps_nobody() -> None:
    for stage, waits in ((Stage(), False), (Stage(give_up_hopeless=False), True)):
        assert not [d for d in late(stage, waits=waits) if isinstance(d, Shelve)]


def test_it_moves_at_the_end_of_a_block_for_a_real_gain_only() -> None:
    stage = Stage(n_instances=2)
    for instance in stage.instances:
        instance.token_budget = instance.capacity = 4000
    request = stage.start("r", n_prompt=584)
    assert stage.policy.block_ending(0.0, request) is None  # it has an instance to itself
    for n in range(4):
        other = make_request(f"o{n}", n_prompt=584)
        seat(other, stage.instances[0])
    stage.policy.load_changed(0.0, stage.instances[0])
    assert stage.policy.block_ending(0.0, request) is stage.instances[1]


def test_all_degrees_are_considered_at_placement() -> None:
    stage = Stage()
    fast = make_instance(9, tp_degree=2, budget=64)
    stage.policy.joined(0.0, fast)
    request = make_request()
    assert stage.policy.place(0.0, request) is fast
    seat(make_request("s"), fast)
    seat(make_request("t"), fast)
    stage.policy.load_changed(0.0, fast)
    assert stage.policy.place(0.0, request) is stage.instances[0]
    stage.policy.left(0.0, stage.instances[0])
    assert stage.policy.place(0.0, request) is None


def test_only_the_least_loaded_may_be_considered() -> None:
    stage = Stage(all_candidates=False)
    fast = make_instance(9, tp_degree=2, budget=64)
    stage.policy.joined(0.0, fast)
    assert stage.policy.place(0.0, make_request()) is stage.instances[0]


def test_the_finish_is_predicted_from_work_ahead_and_steps_left() -> None:
    stage = Stage()
    request = stage.start(slo_s=10.0)
    assert stage.policy.predict_finish_s(0.0, request) == pytest.approx(0.16, rel=0.01)
    waits = stage.park("w")
    stage.policy.tick(0.0)
    assert stage.policy.predict_finish_s(0.0, waits) > 0.16


def test_without_a_profile_latencies_are_learned_from_what_passes_take() -> None:
    stage = Stage(profiles=None, overhead=None)
    request = stage.start(slo_s=2.0)
    assert request.threshold == 0.9  # 16 steps of 100 ms are assumed
    instance: Instance = stage.instances[0]
    for n in range(200):
        other = make_request(f"o{n}")
        done = result(instance, other, latency_ms=300.0)
        stage.policy.stepped(0.0, instance, done, [])
    assert stage.step(0.0, request) == [Retune(request, 0.5)]


def test_it_wakes_while_there_is_anybody_and_forgets_what_has_ended() -> None:
    stage = Stage()
    assert stage.policy.wake_at() is None
    request = stage.start(now=5.0)
    assert stage.policy.wake_at() == 5.0
    stage.policy.tick(5.0)
    assert stage.policy.wake_at() == 5.25
    stage.policy.ended(6.0, request, finished=True)
    assert stage.policy.wake_at() is None
    assert len(stage.policy._ledger) == 0
