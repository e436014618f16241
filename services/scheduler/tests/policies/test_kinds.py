"""Recompute and cache steps."""

from __future__ import annotations

from dilaserve_scheduler.policies.kinds import cache_tokens, recomputes_left, steps_by_kind

from .builders import advance, make_request


def test_every_block_still_to_start_is_a_recompute_step() -> None:
    request = make_request(n_output=32)  # 4 blocks of 8
    assert recomputes_left(request) == 4
    advance(request, 3)
    assert recomputes_left(request) == 3
    advance(request, 5)
    assert (request.block, recomputes_left(request)) == (1, 3)


def test_the_others_are_cache_steps() -> None:
    request = make_request(n_output=32)
    assert steps_by_kind(request, 10.0, "dual") == (4, 6.0)
    assert steps_by_kind(request, 2.5, "prefix") == (4, 0.0)
    assert steps_by_kind(request, 10.0, "none") == (10.0, 0.0)


def test_what_a_cache_step_computes() -> None:
    request = make_request(n_prompt=100, n_output=32)
    assert cache_tokens(request, "dual") == 8
    assert cache_tokens(request, "prefix") == 20  # (32 + 24 + 16 + 8) ÷ 4
    assert cache_tokens(request, "none") == 132
