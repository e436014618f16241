"""The registry, INFaaS's choice, and the pace that it observes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilaserve.errors import SettingsError
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies import POLICIES, PolicyOptions, build_policy
from dilaserve_scheduler.policies.least_loaded import LeastLoaded
from dilaserve_scheduler.policies.pace import Pace

from .driver import info


def make_instance(number: int, budget: int = 256, n_tokens: int = 0) -> Instance:
    instance = Instance(f"i-{number:04}", "i", number, state="live", n_tokens=n_tokens)
    instance.learn(info(instance.instance_id, max_batch_tokens=budget, n_kv_tokens=budget))
    return instance


def make_request(n_tokens: int = 32, arrival_s: float = 0.0) -> Request:
    return Request("r", "m", n_prompt=n_tokens - 8, n_output=8, block_length=8, arrival_s=arrival_s)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(SettingsError, match="DILASERVE_POLICY='best' is no policy; use one of"):
        build_policy("best", PolicyOptions())


def test_policies_are_fresh_objects() -> None:
    for name in POLICIES:
        assert build_policy(name, PolicyOptions()) is not build_policy(name, PolicyOptions())


@given(
    budgets=st.lists(st.sampled_from([100, 256, 512]), min_size=1, max_size=6),
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 512)), max_size=60),
    n_tokens=st.integers(9, 400),
)
def test_the_least_loaded_with_room_is_found(
    budgets: list[int], changes: list[tuple[int, int]], n_tokens: int
) -> None:
    index = LeastLoaded()
    instances = [make_instance(n, budget) for n, budget in enumerate(budgets)]
    for instance in instances:
        index.add(instance)
    for number, load in changes:
        instance = instances[number % len(instances)]
        instance.n_tokens = load
        index.update(instance)
    request = make_request(n_tokens)
    rooms = [i for i in instances if i.has_room(request)]
    expected = min(rooms, key=lambda i: (i.n_tokens, i.number), default=None)
    assert index.first_with_room(request) is expected
    assert index.first_with_room(request) is expected  # looking changes nothing
    assert index.total_budget("m") == sum(budgets)


def test_one_that_left_is_not_chosen_and_may_return() -> None:
    index, instance = LeastLoaded(), make_instance(1)
    index.add(instance)
    index.remove(instance)
    assert index.first_with_room(make_request()) is None
    index.update(instance)
    assert index.first_with_room(make_request()) is None
    index.add(instance)
    assert index.first_with_room(make_request()) is instance


def test_one_that_refused_the_request_is_not_chosen() -> None:
    index, request = LeastLoaded(), make_request()
    for number in (1, 2):
        index.add(make_instance(number))
    request.refused_by = frozenset({"i-0001"})
    chosen = index.first_with_room(request)
    assert chosen is not None
    assert chosen.instance_id == "i-0002"


def test_the_heap_does_not_grow_with_the_number_of_changes() -> None:
    index, instance = LeastLoaded(), make_instance(1)
    index.add(instance)
    for load in range(1000):
        instance.n_tokens = load
        index.update(instance)
    (pool,) = index._pools.values()
    assert len(pool.heap) <= 9


def test_pace_is_the_rate_of_completion() -> None:
    pace = Pace()
    for second in range(1, 301):
        request = make_request(100, arrival_s=float(second - 1))
        request.step = 4
        pace.finished(float(second), request)
    assert pace.drain_s(300.0, 1000) == pytest.approx(10.0, rel=0.05)
    assert pace.steps(make_request()) == pytest.approx(4.0)


def test_pace_is_not_told_from_long_ago() -> None:
    pace = Pace()
    assert pace.drain_s(0.0, 100) is None
    pace.finished(1.0, make_request())
    assert pace.drain_s(2.0, 100) is not None
    assert pace.drain_s(62.0, 100) is None


def test_time_left_shrinks_with_progress() -> None:
    pace, request = Pace(), make_request()
    before = pace.time_left_s(request, 0.5)
    request.n_unmasked = 4
    assert before == pytest.approx(8 * 0.5)
    assert pace.time_left_s(request, 0.5) == pytest.approx(before / 2)
