"""Recompute and cache steps of a request (paper 3.4), and what a step of each kind computes."""

from __future__ import annotations

from dilaserve.messages import CacheMode
from dilaserve_scheduler.core.model import Instance, Request

__all__ = ["cache_mode", "cache_tokens", "recomputes_left", "steps_by_kind"]


def recomputes_left(request: Request) -> int:
    """Blocks still to start: each begins with a recompute step."""
    block = request.block
    return request.n_blocks - block - (request.n_block_masked != request.block_size(block))


def steps_by_kind(request: Request, steps: float, mode: CacheMode) -> tuple[float, float]:
    """(recompute, cache) of the steps that are left. Without a cache every step recomputes."""
    if mode == "none":
        return steps, 0.0
    recomputes = recomputes_left(request)
    return recomputes, max(0.0, steps - recomputes)


def cache_tokens(request: Request, mode: CacheMode) -> int:
    """Tokens that a cache step of the request computes; with the prefix alone cached, the mean
    over its blocks."""
    match mode:
        case "dual":
            return min(request.block_length, request.n_output)
        case "prefix":
            return (request.n_output + request.block_length) // 2
        case "none":
            return request.n_tokens


def cache_mode(instance: Instance | None) -> CacheMode:
    """Of an instance; dual, the default, where it is not known."""
    return instance.info.cache_mode if instance is not None and instance.info else "dual"
