"""Levels by priority, and who is hopeless. Latencies: see builders.profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.policy import Limit
from dilaserve_scheduler.policies.cluster_load import (
    HOPELESS_FACTOR,
    OVERLOAD_SLOS,
    SURELY,
    UTILISATION,
    ClusterLoad,
)
from dilaserve_scheduler.policies.fastest import Fastest
from dilaserve_scheduler.policies.habits import Habits
from dilaserve_scheduler.policies.ledger import Ledger
from dilaserve_scheduler.policies.pricing import Pricing
from dilaserve_scheduler.policies.token_load import supply_tokens_per_s

from .builders import make_instance, make_request, options


class Stage:
    """One instance with room for two requests of 32 tokens; every pass takes 10 ms, so that a step
    of a request costs 5 ms: 40 ms of 8 steps at 0.5, 80 ms of 16 at 0.9."""

    def __init__(self, **changes: Any) -> None:
        self.ledger = Ledger(2)
        settings = options(**({"horizon_slos": 0.0} | changes))
        habits = Habits(settings.thresholds, settings.steps_per_token)
        pricing = Pricing(settings.profiles, settings.overhead)
        self.fastest = Fastest()
        self.fastest.add(make_instance(budget=64))
        self.load = ClusterLoad(self.ledger, habits, pricing, self.fastest, settings)

    def enter(
        self, name: str, *, deadline: float, waits: bool = True, floor: int = 0, **changes: Any
    ) -> Request:
        request = make_request(name, **changes)
        course = self.ledger.add(
            request, steps=[8, 16], upper=[8, 16], deadline=deadline, n_cache=8, floor=floor
        )
        self.ledger.is_waiting[course.slot] = waits
        return request

    def caps(self, *requests: Request) -> list[int]:
        return [self.load.cap(course) for course in self.ledger.courses_of(requests)]


def test_without_pressure_everybody_may_use_the_highest() -> None:
    stage = Stage()
    requests = [stage.enter(f"r{n}", deadline=10.0) for n in range(4)]
    assert stage.load.control(0.0) == []
    assert stage.caps(*requests) == [1, 1, 1, 1]
    assert stage.load.wait_s == pytest.approx(4 * 0.080 / UTILISATION)


def test_a_queue_lowers_the_level_as_far_as_the_deadlines_ask() -> None:
    """Ahead of the last of ten: nine times 40 ms to 80 ms; no service time, as nothing arrives."""
    for slack, level in ((0.36, 0.0), (0.54, 0.5), (0.72, 1.0)):
        stage = Stage()
        for n in range(10):
            stage.enter(f"r{n}", deadline=slack / UTILISATION)
        stage.load.control(0.0)
        assert stage.load._levels[0] == pytest.approx(level, abs=1e-6)


def test_a_level_between_two_candidates_gives_a_share_of_the_requests_the_higher() -> None:
    stage = Stage()
    requests = [stage.enter(f"r{n}", deadline=0.54 / UTILISATION * 99 / 9) for n in range(100)]
    stage.load.control(0.0)
    assert np.mean(stage.caps(*requests)) == pytest.approx(0.5, abs=0.03)


def test_a_higher_priority_keeps_its_range_while_lower_ones_give_way() -> None:
    """Five of each: with those above at 80 ms, 5 × 80 + 4 × 40 are ahead of the last."""
    stage = Stage()
    deadline = (5 * 0.080 + 4 * 0.040) / UTILISATION
    high = [stage.enter(f"h{n}", deadline=deadline, priority=1) for n in range(5)]
    low = [stage.enter(f"l{n}", deadline=deadline) for n in range(5)]
    stage.load.control(0.0)
    assert stage.caps(*high) == [1] * 5
    assert stage.caps(*low) == [0] * 5


def test_a_quality_floor_holds_below_the_level() -> None:
    stage = Stage()
    requests = [stage.enter(f"r{n}", deadline=0.3, floor=n == 0) for n in range(10)]
    stage.load.control(0.0)
    assert stage.caps(*requests[:2]) == [1, 0]


def test_arrivals_to_come_lower_the_level_before_anybody_waits() -> None:
    """25 a second need 1 to 2 instance-seconds a second: more than one instance has."""
    stage = Stage(horizon_slos=3.0, slo_s=1.0)
    requests = []
    for n in range(50):
        request = stage.enter(f"r{n}", deadline=10.0, waits=False)
        stage.load.arrived(n / 25, request, n_cache=8, slo_s=1.0)
        requests.append(request)
    for request in requests[:-2]:
        stage.ledger.remove(request)
    stage.load.control(2.0)
    assert stage.load._levels[0] < 0.5
    calm = Stage(horizon_slos=0.0, slo_s=1.0)
    calm.load.arrived(0.0, calm.enter("r", deadline=10.0, waits=False), n_cache=8, slo_s=1.0)
    calm.load.control(2.0)
    assert calm.load._levels[0] == 1.0


def test_a_tight_slo_of_another_priority_lowers_nobody_else() -> None:
    """In 50 ms an arrival of 16 steps could not be served; nobody else is held to that."""
    stage = Stage(horizon_slos=1.5)
    strict = stage.enter("strict", deadline=0.05, waits=False, priority=7)
    stage.load.arrived(0.0, strict, n_cache=8, slo_s=0.05)
    stage.ledger.remove(strict)
    request = stage.enter("r", deadline=20.0, waits=False)
    stage.load.arrived(10.0, request, n_cache=8, slo_s=10.0)
    stage.load.control(10.0)
    assert stage.load._levels[0] == 1.0


@pytest.mark.parametrize("load_control", [True, False])
def test_the_hopeless_are_named_once_run_at_the_lowest_and_drag_nobody_down(
    load_control: bool,
) -> None:
    """Surely late, by a pass of 10 ms, or probably, where lower thresholds help nobody any more."""
    stage = Stage(load_control=load_control)
    need_s = 8 * 0.010 * (1 / SURELY if load_control else HOPELESS_FACTOR)
    hopeless = stage.enter("late", deadline=need_s - 0.001)
    requests = [stage.enter(f"r{n}", deadline=need_s + 1.0) for n in range(3)]
    assert stage.load.control(0.0) == [hopeless]
    assert stage.caps(hopeless, *requests) == [0, 1, 1, 1]
    assert stage.load.control(0.1) == []
    stage.enter("just", deadline=need_s + 0.001)
    assert stage.load.control(0.0) == []


def test_one_that_runs_is_never_given_up_for_the_pass_of_a_full_instance() -> None:
    """However slow that would be: it may have an instance to itself."""
    stage = Stage()
    running = stage.enter("r", deadline=0.05, waits=False)
    assert stage.load.control(0.0) == []
    assert stage.caps(running) == [1]


def test_arrivals_are_reckoned_with_the_pass_of_the_present_load() -> None:
    """A pass takes 10 ms alone, and more than 20 in a full instance: 16 steps, 160 or 320 ms."""
    stage = Stage(horizon_slos=1.0, slo_s=0.3)
    stage.fastest.add(make_instance(2, budget=1280))
    request = stage.enter("r", deadline=0.3, waits=False)
    stage.load.arrived(0.0, request, n_cache=8, slo_s=0.3)
    stage.load.control(0.0)
    assert stage.load._pass_s > 0.02  # 8 steps of it would be in time, 16 not
    assert stage.caps(request) == [1]


def test_a_faster_degree_counts_for_more() -> None:
    stage = Stage()
    stage.enter("r", deadline=10.0)
    stage.load.control(0.0)
    assert stage.load._capacity() == pytest.approx(UTILISATION)
    stage.fastest.add(make_instance(2, tp_degree=2, budget=64))
    stage.load.control(0.0)
    assert stage.load._capacity() == pytest.approx(3 * UTILISATION)


def test_without_load_control_the_level_stays() -> None:
    stage = Stage(load_control=False)
    requests = [stage.enter(f"r{n}", deadline=0.3) for n in range(10)]
    stage.load.control(0.0)
    assert stage.caps(*requests) == [1] * 10


def test_arrivals_are_reckoned_with_further_ahead_the_less_the_lowest_thresholds_help() -> None:
    """An instance-second of work in a second is more than UTILISATION of the instance by 0.03."""
    for rate, work, slos in ((1.0, 0.5, 2.0), (1.0, 1.0, 2.0 + OVERLOAD_SLOS / UTILISATION * 0.03)):
        stage = Stage(horizon_slos=2.0)
        stage.enter("r", deadline=10.0)
        stage.load.control(0.0)
        assert stage.load._horizon_s(3.0, rate * work) == pytest.approx(3.0 * slos)


def test_without_a_forecast_only_who_is_there_and_the_next_count() -> None:
    stage = Stage(horizon_slos=3.0, slo_s=1.0, forecast=False)
    for n in range(50):
        stage.load.arrived(n / 25, make_request(f"r{n}"), n_cache=8, slo_s=1.0)
    request = stage.enter("r", deadline=10.0, waits=False)
    stage.load.control(2.0)
    assert stage.caps(request) == [1]


def test_in_tokens_the_cache_hides_the_threshold() -> None:
    """Of 1,000 + 16 tokens two recompute steps are nearly all, at either threshold."""
    work = {}
    for seconds in (True, False):
        stage = Stage(instance_seconds=seconds)
        stage.fastest.add(make_instance(2, budget=2048))
        stage.enter("r", deadline=10.0, n_prompt=1000)
        stage.load.control(0.0)
        low, high = stage.load._work_s(stage.ledger.active())[:, 0].tolist()
        work[seconds] = high / low
    assert work[False] == pytest.approx((2 * 1016 + 14 * 8) / (2 * 1016 + 6 * 8))
    assert work[True] > work[False]


def test_in_tokens_capacity_is_the_papers() -> None:
    stage = Stage(instance_seconds=False)
    stage.enter("r", deadline=10.0)
    stage.load.control(0.0)
    instances = list(stage.fastest.instances.values())
    assert stage.load._capacity() == supply_tokens_per_s(instances[0], stage.load._pricing)


class Wide(Stage):
    """A pass of up to 1,000 tokens takes 50 ms, every token more 0.1 ms: room for four requests of
    1,016, which together would be slow, and alone leave passes half empty."""

    def __init__(self, **changes: Any) -> None:
        points = [Point(1000, 0.050), Point(5000, 0.450)]
        profile = LatencyProfile(tp_degree=1, points=points)
        super().__init__(profiles=ProfileSet(model="m", device="d", profiles=[profile]), **changes)
        self.fastest.remove(next(iter(self.fastest.instances.values())))
        self.fastest.add(make_instance(2, budget=4096))
        for n in range(4):
            self.enter(f"r{n}", deadline=10.0, n_prompt=1000, waits=False)


def test_rows_that_recompute_are_limited_where_that_makes_passes_faster() -> None:
    stage = Wide()
    stage.load.control(0.0)
    (limit,) = stage.load.limits()
    assert limit.recompute_tokens == 1016
    limit.instance.recompute_tokens = 1016
    assert stage.load.limits() == []
    stage.enter("shorter", deadline=10.0, n_prompt=900, waits=False)
    stage.load.control(0.0)
    assert stage.load.limits() == []  # 996: not worth a word
    stage.enter("longer", deadline=10.0, n_prompt=2000, waits=False)
    stage.load.control(0.0)
    assert [limit.recompute_tokens for limit in stage.load.limits()] == [1166]


def test_without_a_gain_and_when_told_so_there_is_no_limit() -> None:
    calm = Stage()  # every pass takes 10 ms
    calm.enter("r", deadline=10.0)
    calm.load.control(0.0)
    assert calm.load.limits() == []
    (instance,) = calm.fastest.instances.values()
    instance.recompute_tokens = 100  # by an earlier scheduler
    calm.load.joined(1)
    assert calm.load.limits() == [Limit(instance, None)]
    stage = Wide(limit_recomputes=False)
    stage.load.control(0.0)
    assert stage.load.limits() == []


def test_who_is_not_given_up_keeps_its_place() -> None:
    stage = Stage(give_up_hopeless=False)
    stage.enter("late", deadline=0.001)
    assert stage.load.control(0.0) == []


def test_nobody_or_nothing_there_is_no_error() -> None:
    assert Stage().load.control(0.0) == []
    stage = Stage()
    stage.enter("r", deadline=1.0)
    for instance in list(stage.fastest.instances.values()):
        stage.fastest.remove(instance)
    assert stage.load.control(0.0) == []
