"""Seconds of a pass: from the profile, times the overhead, or learned."""

from __future__ import annotations

import pytest

from dilaserve.messages import StepKind
from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_scheduler.policies.pricing import Batch, Line, Pricing

from .builders import profiles


def test_the_profile_times_the_given_overhead() -> None:
    pricing = Pricing(profiles(), 1.5)
    pricing.observe(1, 100, 1.0)  # does not matter
    assert pricing.seconds(1, 600) == pytest.approx(1.5 * 0.060)
    assert pricing.seconds(2, 600) == pytest.approx(1.5 * 0.030)


def test_the_overhead_is_learned_per_degree() -> None:
    pricing = Pricing(profiles(), None)
    assert pricing.seconds(1, 600) == pytest.approx(0.060)
    for n_tokens, seconds in ((100, 0.014), (600, 0.084), (1100, 0.154)):
        pricing.observe(1, n_tokens, seconds)
    assert pricing.overhead(1) == pytest.approx(1.4)
    assert pricing.seconds(1, 600) == pytest.approx(0.084)
    assert pricing.seconds(2, 600) == pytest.approx(0.030)


def test_without_a_profile_a_line_is_learned() -> None:
    pricing = Pricing(None, None)
    assert pricing.seconds(1, 50) == pytest.approx(0.1)
    for n_tokens in (32, 64, 200, 32, 100):
        pricing.observe(1, n_tokens, 0.02 + 0.001 * n_tokens)
    assert pricing.seconds(1, 500) == pytest.approx(0.52)
    assert pricing.seconds(2, 500) == pytest.approx(0.1)  # nothing known of that one


def test_a_line_neither_falls_nor_starts_below_zero() -> None:
    falling = Line()
    for n_tokens in (10, 100, 200):
        falling.observe(n_tokens, 1.0 / n_tokens)
    assert falling.seconds(1000) == falling.seconds(0) > 0
    steep = Line()
    steep.observe(100, 0.001)
    steep.observe(200, 1.0)
    assert steep.seconds(0) == pytest.approx(0.0)
    assert steep.seconds(300) > steep.seconds(150) > 0


def test_a_line_forgets() -> None:
    line = Line()
    for _ in range(2000):
        line.observe(50, 1.0)
    for _ in range(2000):
        line.observe(50, 2.0)
    assert line.seconds(50) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("known", [True, False])
def test_a_slow_start_is_soon_forgotten(known: bool) -> None:
    pricing = Pricing(profiles() if known else None, None)
    pricing.observe(1, 32, 5.0)
    for _ in range(20):
        pricing.observe(1, 32, 0.010)
    assert pricing.seconds(1, 32) == pytest.approx(0.010, rel=0.1)


def test_a_mixed_batch_is_priced_over_how_many_recompute() -> None:
    """Two rows, each recomputing 640 tokens with probability 1/2, else 64 of the cache: 128 tokens
    (12.8 ms), 704 (70.4) or 1280 (128, beyond what was measured) with 1/4, 1/2, 1/4."""
    pricing = Pricing(profiles(), 1.0)
    batch = Batch(n_rows=2, n_full=640, n_cache=64, recompute_share=0.5)
    expected = 0.25 * 0.0128 + 0.5 * 0.0704 + 0.25 * 0.128
    assert pricing.mean_s(1, batch) == pytest.approx(expected)
    assert Pricing(profiles(), 2.0).mean_s(1, batch) == pytest.approx(2 * expected)


def test_putting_off_rows_costs_their_steps_and_saves_their_tokens() -> None:
    """One of two may recompute: both are due (in 1/3 of the passes), one (1/2) or none (1/6). In a
    third of the passes one is put off, and no pass has more than 704 tokens."""
    pricing = Pricing(profiles(), 1.0)
    batch = Batch(n_rows=2, n_full=640, n_cache=64, recompute_share=0.5, n_together=1)
    passes = 0.064 / 3 + 0.0704 / 2 + 0.0128 / 6
    assert pricing.mean_s(1, batch) == pytest.approx(passes * 2 / (5 / 3))
    split = pricing.split(1, batch)
    tokens = 640 / 3 + 704 / 2 + 128 / 6
    assert 5 / 3 * split.row_s + tokens * split.token_s == pytest.approx(passes, rel=1e-3)


def test_small_batches_are_not_rounded_to_nothing() -> None:
    batch = Batch(n_rows=1, n_full=33, n_cache=8, recompute_share=0.3)
    assert Pricing(profiles(), 1.0).mean_s(1, batch) == pytest.approx(0.010)


def test_rows_and_tokens_share_out_a_pass() -> None:
    """A line of 5 ms and 0.1 ms a token: two rows pay the 5 ms."""
    pricing = Pricing(None, None)
    for n_tokens in (10, 50, 400):
        pricing.observe(1, n_tokens, 0.005 + 1e-4 * n_tokens)
    split = pricing.split(1, Batch(n_rows=2, n_full=300, n_cache=10, recompute_share=0.2))
    assert split.token_s == pytest.approx(1e-4)
    assert split.row_s == pytest.approx(0.0025)


def test_what_is_shared_out_adds_up_to_the_pass() -> None:
    pricing = Pricing(profiles(), 1.0)
    batch = Batch(n_rows=3, n_full=640, n_cache=32, recompute_share=0.25)
    split = pricing.split(1, batch)
    n_tokens = 3 * (32 + 0.25 * (640 - 32))
    assert 3 * split.row_s + n_tokens * split.token_s == pytest.approx(
        pricing.mean_s(1, batch), rel=1e-3
    )


def with_kinds() -> ProfileSet:
    """10 ms and 0.1 ms a token of a cache step, twice that of a recompute step."""
    factors: dict[StepKind, float] = {"cache": 1.0, "recompute": 2.0}
    points = [
        Point(n, factor * (0.010 + 1e-4 * n), kind, None, 640)
        for kind, factor in factors.items()
        for n in (1, 2000)
    ]
    return ProfileSet(model="m", device="d", profiles=[LatencyProfile(tp_degree=1, points=points)])


def test_where_kinds_were_measured_a_pass_costs_what_it_is_made_of() -> None:
    pricing = Pricing(with_kinds(), 1.0)
    assert pricing.seconds(1, 640, n_full=0) == pytest.approx(0.074)
    assert pricing.seconds(1, 640, n_full=640) == pytest.approx(2 * 0.074)
    assert pricing.seconds(1, 640, n_full=160) == pytest.approx(1.25 * 0.074)


def test_a_mixed_batch_is_priced_by_kind() -> None:
    """As above: 128 tokens of the cache, 704 of which 640 recompute, or 1280 that all do."""
    batch = Batch(n_rows=2, n_full=640, n_cache=64, recompute_share=0.5)
    expected = 0.25 * 0.0228 + 0.5 * (1 + 640 / 704) * 0.0804 + 0.25 * 2 * 0.138
    pricing = Pricing(with_kinds(), 1.0)
    assert pricing.mean_s(1, batch) == pytest.approx(expected)
    split = pricing.split(1, batch)
    assert 2 * split.row_s + 704 * split.token_s == pytest.approx(expected)


def test_the_overhead_is_learned_over_what_passes_were_made_of() -> None:
    pricing = Pricing(with_kinds(), None)
    for n_full in (0, 640, 160):
        seconds = (1 + n_full / 640) * 0.074
        pricing.observe(1, 640, 1.3 * seconds, n_full=n_full)
    assert pricing.overhead(1) == pytest.approx(1.3)
