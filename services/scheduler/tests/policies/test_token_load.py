"""Algorithm 2 as printed."""

from __future__ import annotations

import pytest

from dilaserve_scheduler.policies.pricing import Pricing
from dilaserve_scheduler.policies.token_load import TokenLoad, caps, supply_tokens_per_s

from .builders import make_instance, make_request, profiles


def load(*, is_hopeless: bool = False) -> TokenLoad:
    """32 tokens, two blocks of 8: 2 recompute steps (64), cache steps of 8 tokens: 6 at the lower
    threshold (112 in all), 14 at the higher (176)."""
    return TokenLoad(make_request(), [8.0, 16.0], "dual", is_hopeless=is_hopeless)


def test_load_is_recompute_and_cache_steps() -> None:
    assert (load().tokens(0), load().tokens(1)) == (112, 176)
    without_cache = TokenLoad(make_request(), [8.0, 16.0], "none")
    assert without_cache.tokens(1) == 16 * 32


@pytest.mark.parametrize(
    ("supply", "expected"),
    [
        (336, [0, 0, 0]),  # all at the lowest
        (399, [0, 0, 0]),
        (400, [1, 0, 0]),  # 176 + 112 + 112
        (464, [1, 1, 0]),
        (528, [1, 1, 1]),
    ],
)
def test_the_first_get_the_wider_range(supply: float, expected: list[int]) -> None:
    assert caps([load(), load(), load()], supply) == expected


def test_the_hopeless_stay_at_the_lowest_and_leave_the_rest_to_others() -> None:
    assert caps([load(is_hopeless=True), load()], 288) == [0, 1]
    assert caps([load(), load()], 288) == [1, 0]


def test_supply_is_that_of_an_instance_full_of_typical_requests() -> None:
    """8,192 tokens hold 5 of 1,536: 31 cache steps of 160 tokens, one recompute of 7,680."""
    instance = make_instance(budget=8192)
    instance.info = None  # dual, blocks of 32
    pricing = Pricing(profiles(), 1.0)
    seconds = 31 * pricing.seconds(1, 160) + pricing.seconds(1, 7680)
    assert supply_tokens_per_s(instance, pricing) == pytest.approx((31 * 160 + 7680) / seconds)
