"""Moves at the start of a block, to the least loaded, for a strict gain."""

from __future__ import annotations

import pytest

from dilaserve_scheduler.policies.llumnix import Llumnix

from .builders import make_instance, make_request, options, result, seat


def stage(here: int, there: int, degrees: tuple[int, int] = (1, 1)):  # type: ignore[no-untyped-def]
    """A request of 200 tokens on the first of two instances, with so much beside it."""
    policy = Llumnix(options())
    instances = [make_instance(n, tp_degree=d, budget=1024) for n, d in enumerate(degrees)]
    for instance in instances:
        policy.joined(0.0, instance)
    request = make_request(n_prompt=184)
    seat(request, instances[0])
    instances[0].n_tokens += here
    instances[1].n_tokens += there
    for instance in instances:
        policy.load_changed(0.0, instance)
    return policy, request, instances


@pytest.mark.parametrize(
    ("here", "there", "moves"),
    [
        (200, 100, True),  # 400 tokens here, 300 with it there
        (200, 200, False),  # no strict gain
        (100, 200, False),
        (0, 0, False),  # below 100 tokens nothing gets faster
    ],
)
def test_to_the_least_loaded_if_that_is_faster(here: int, there: int, moves: bool) -> None:
    policy, request, instances = stage(here, there)
    assert policy.block_ending(0.0, request) is (instances[1] if moves else None)


def test_only_the_least_loaded_is_looked_at() -> None:
    """The paper's rule: where the request is already on it, a faster degree is not seen."""
    policy, request, _ = stage(0, 250, degrees=(1, 2))
    assert policy.block_ending(0.0, request) is None


def test_not_without_room() -> None:
    policy, request, instances = stage(700, 600)
    assert policy.block_ending(0.0, request) is instances[1]
    instances[1].token_budget = 700
    assert policy.block_ending(0.0, request) is None


def test_thresholds_and_placement_are_infaas() -> None:
    policy, _, instances = stage(200, 100)
    assert policy.threshold(0.0, make_request(), None) == 0.9
    assert policy.place(0.0, make_request("s")) is instances[1]
    assert policy.stepped(0.0, instances[0], result(instances[0]), []) == ()
