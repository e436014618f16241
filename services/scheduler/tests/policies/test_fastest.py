"""Which instance runs a request's steps fastest."""

from __future__ import annotations

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies.fastest import Fastest, tp_degree
from dilaserve_scheduler.policies.pricing import Pricing

from .builders import make_instance, make_request, profiles


def step_s(instance: Instance, request: Request) -> float:
    pricing = Pricing(profiles(), 1.0)
    return pricing.seconds(tp_degree(instance), instance.n_tokens + request.n_tokens)


def stage(*loads: tuple[int, int]) -> tuple[Fastest, list[Instance]]:
    """Instances by (TP degree, tokens on it)."""
    fastest, instances = Fastest(), []
    for number, (degree, n_tokens) in enumerate(loads):
        instance = make_instance(number, tp_degree=degree, budget=1024)
        fastest.add(instance)
        instance.n_tokens = n_tokens
        fastest.update(instance)
        instances.append(instance)
    return fastest, instances


def test_within_a_degree_the_least_loaded() -> None:
    fastest, instances = stage((1, 300), (1, 200), (1, 200))
    assert fastest.with_room(make_request(), step_s) is instances[1]


def test_a_higher_degree_while_it_is_faster_even_if_more_loaded() -> None:
    fastest, instances = stage((1, 300), (2, 500))  # 33.2 ms against 26.6
    assert fastest.with_room(make_request(), step_s) is instances[1]
    fastest, instances = stage((1, 300), (2, 700))  # 33.2 ms against 36.6
    assert fastest.with_room(make_request(), step_s) is instances[0]


def test_one_without_room_is_passed_over() -> None:
    fastest, instances = stage((1, 300), (2, 1000))
    assert fastest.with_room(make_request(), step_s) is instances[0]
    assert fastest.with_room(make_request(n_prompt=900), step_s) is None


def test_one_that_left_is_not_chosen() -> None:
    fastest, instances = stage((1, 0), (2, 0))
    assert fastest.degrees() == [2, 1]
    fastest.remove(instances[1])
    fastest.remove(instances[1])
    assert fastest.degrees() == [1]
    assert fastest.with_room(make_request(), step_s) is instances[0]
