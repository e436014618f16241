"""The recent rate and sizes."""

from __future__ import annotations

import pytest

from dilaserve_scheduler.policies.arrivals import LEAST_SPAN_S, WINDOW_S, Arrivals

from .builders import make_request


def arrive(arrivals: Arrivals, start: float, per_s: float, n: int, n_output: int = 16) -> float:
    for number in range(n):
        request = make_request(n_prompt=84, n_output=n_output)
        arrivals.observe(start + number / per_s, request, n_cache=8, slo_s=2.0)
    return start + n / per_s


def test_before_anything_there_is_no_rate() -> None:
    assert Arrivals().rate(5.0) == 0.0


def test_a_first_arrival_is_no_flood() -> None:
    arrivals = Arrivals()
    arrive(arrivals, 0.0, 1.0, 1)
    assert arrivals.rate(0.0) == pytest.approx(1 / LEAST_SPAN_S, rel=0.05)


@pytest.mark.parametrize("seconds", [3, 100])
def test_a_steady_rate_is_found_soon(seconds: int) -> None:
    arrivals = Arrivals()
    now = arrive(arrivals, 50.0, 20.0, 20 * seconds)
    assert arrivals.rate(now) == pytest.approx(20.0, rel=0.02)


def test_it_follows_and_fades() -> None:
    arrivals = Arrivals()
    now = arrive(arrivals, 0.0, 20.0, 2000)
    now = arrive(arrivals, now, 5.0, int(5 * 4 * WINDOW_S))
    assert arrivals.rate(now) == pytest.approx(5.0, rel=0.1)
    assert arrivals.rate(now + 5 * WINDOW_S) < 0.1


def test_the_mean_arrival_is_of_the_recent_ones() -> None:
    arrivals = Arrivals()
    now = arrive(arrivals, 0.0, 10.0, 100, n_output=16)
    assert arrivals.mean() == pytest.approx((16, 100, 8, 2, 2.0))
    arrive(arrivals, now, 10.0, 1000, n_output=32)
    assert arrivals.mean() == pytest.approx((32, 116, 8, 4, 2.0), rel=0.01)
