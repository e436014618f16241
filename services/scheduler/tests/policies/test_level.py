"""The highest level that fits, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dilaserve_scheduler.policies.level import Forecast, Queue, highest_level

NONE_COME = Forecast(rate=0.0, work_s=np.array([0.0, 0.0, 0.0]), slack_s=math.inf, horizon_s=0.0)
NO_SERVICE = np.zeros(3)


def level(
    work: Sequence[Sequence[float]],
    slack: list[float],
    forecast: Forecast = NONE_COME,
    service: list[float] | None = None,
) -> float:
    queue = Queue(np.array(work, dtype=float).reshape(-1, 3).T, np.array(slack))
    half = np.array(service) if service else NO_SERVICE
    return highest_level(queue, forecast, capacity=1.0, reserve_s=half)


def test_an_empty_cluster_affords_the_highest() -> None:
    assert level([], []) == 2.0


def test_work_ahead_counts_and_the_own_does_not() -> None:
    """1, 2 or 4 seconds ahead of the second; its own 9 do not matter."""
    work = [[1, 2, 4], [9, 9, 9]]
    assert level(work, [math.inf, 4.0]) == 2.0
    assert level(work, [math.inf, 3.0]) == 1.5
    assert level(work, [math.inf, 2.0]) == 1.0
    assert level(work, [math.inf, 1.25]) == 0.25
    assert level(work, [math.inf, 0.5]) == 0.0


def test_the_tightest_decides() -> None:
    work = [[1, 2, 4], [1, 2, 4], [1, 2, 4]]
    assert level(work, [math.inf, 4.0, 4.0]) == 1.0
    assert level(work, [math.inf, 1.5, 8.0]) == 0.5


def test_half_of_the_time_in_service_counts() -> None:
    assert level([[1, 2, 4], [0, 0, 0]], [math.inf, 3.0], service=[1, 1, 1]) == 1.0


def test_arrivals_to_come_lower_it_before_anybody_waits() -> None:
    """Each of 2 a second needs 0.4, 0.6 or 0.8 s: at 0.6 the cluster falls 0.2 s behind a second,
    in 10 s 2 s: what their slack allows. At 0.8 it would be 6 s."""

    def coming(slack_s: float) -> Forecast:
        return Forecast(rate=2.0, work_s=np.array([0.4, 0.6, 0.8]), slack_s=slack_s, horizon_s=10.0)

    assert level([], [], coming(6.0)) == 2.0
    assert level([], [], coming(2.0)) == 1.0
    assert level([], [], coming(4.0)) == 1.5
    assert level([[3, 3, 3]], [math.inf], coming(4.0)) == pytest.approx(0.75)


def test_what_does_not_follow_the_level_cannot_lower_it_in_vain() -> None:
    """A level that helps nobody is still the lowest: there is none that fits."""
    assert level([[5, 5, 5], [0, 0, 0]], [math.inf, 1.0]) == 0.0
