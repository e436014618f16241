"""Mixtures of thresholds by arrival rate."""

from __future__ import annotations

from collections import Counter

import pytest

from dilaserve_scheduler.policies.proteus import Proteus, best_mixture

from .builders import make_instance, make_request, options


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (5.0, [0.0, 0.0, 1.0]),
        (10.0, [0.0, 0.0, 1.0]),
        (12.0, [0.0, 0.6666667, 0.3333333]),  # 1/12 s each: 2/3 × 1/13.33… + 1/3 × 1/10
        (20.0, [1.0, 0.0, 0.0]),
        (30.0, [1.0, 0.0, 0.0]),  # out of reach
    ],
)
def test_the_best_accuracy_within_capacity(rate: float, expected: list[float]) -> None:
    capacities = [20.0, 40 / 3, 10.0]
    assert best_mixture([0.5, 0.7, 0.8], capacities, rate) == pytest.approx(expected)


def test_a_bad_variant_is_skipped_for_a_mixture_of_its_neighbours() -> None:
    """At 13.33 a second the middle one fits, but 1/2 of each neighbour is better."""
    shares = best_mixture([0.5, 0.55, 0.8], [20.0, 40 / 3, 10.0], 40 / 3)
    assert shares == pytest.approx([0.5, 0.0, 0.5])


def test_of_equally_accurate_mixtures_the_higher() -> None:
    assert best_mixture([0.7, 0.8, 0.8], [30.0, 20.0, 10.0], 1.0) == [0.0, 0.0, 1.0]


def test_a_request_keeps_its_threshold() -> None:
    policy = Proteus(options())
    policy.joined(0.0, make_instance())
    request = make_request()
    assert policy.threshold(0.0, request, None) == 0.9
    policy._mixture = [1.0, 0.0]
    assert policy.threshold(5.0, request, None) == 0.9
    assert policy.threshold(5.0, make_request("s"), None) == 0.5
    assert policy.threshold(5.0, make_request("t", min_confidence=0.8), None) == 0.8
    for name in ("r", "s", "t"):
        policy.ended(6.0, make_request(name), finished=False)
    assert policy.wake_at() is None


def test_arrivals_are_dealt_by_the_shares() -> None:
    policy = Proteus(options())
    policy._mixture = [0.25, 0.75]
    dealt = Counter(policy.threshold(0.0, make_request(f"r{n}"), None) for n in range(100))
    assert dealt == {0.5: 25, 0.9: 75}


@pytest.mark.parametrize(("per_s", "lowest"), [(1.0, 0.0), (300.0, 1.0)])
def test_the_mixture_follows_the_rate(per_s: float, lowest: float) -> None:
    policy = Proteus(options())
    policy.joined(0.0, make_instance())
    for n in range(600):
        policy.threshold(n / per_s, make_request(f"r{n}"), None)
    policy.tick(600 / per_s)
    assert policy._mixture[0] == lowest
    assert policy.wake_at() == 600 / per_s + 10.0
