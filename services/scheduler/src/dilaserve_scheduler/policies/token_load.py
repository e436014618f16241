"""Algorithm 2 as printed: load and capacity in tokens, caps by a walk in order of arrival.

Source: papers/algorithms.md, A.5. Knows no clock and no instance's requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilaserve.messages import CacheMode
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies.fastest import tp_degree
from dilaserve_scheduler.policies.kinds import cache_mode, cache_tokens, steps_by_kind
from dilaserve_scheduler.policies.pricing import Pricing

__all__ = ["TokenLoad", "caps", "supply_tokens_per_s"]

TYPICAL_TOKENS = 1536
"""The artifact's full length of a typical request."""


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """What is left of a request."""

    request: Request
    steps: Sequence[float]
    """By candidate threshold, ascending."""
    mode: CacheMode
    is_hopeless: bool = False

    def tokens(self, k: int) -> float:
        """To compute if it keeps candidate k."""
        recomputes, caches = steps_by_kind(self.request, self.steps[k], self.mode)
        n_cache = cache_tokens(self.request, self.mode)
        return recomputes * self.request.n_tokens + caches * n_cache


def caps(loads: Sequence[TokenLoad], supply: float) -> list[int]:
    """The index of the highest candidate that each may use, given in the order of the walk: with
    those before it at their caps and those after it at the lowest threshold, all fits."""
    lowest = [load.tokens(0) for load in loads]
    after = sum(lowest)
    used, found = 0.0, []
    for load, low in zip(loads, lowest, strict=True):
        after -= low
        cap, tokens = 0, low
        for k in range(len(load.steps) - 1, 0, -1):
            if load.is_hopeless:
                break
            wanted = load.tokens(k)
            if used + wanted + after <= supply:
                cap, tokens = k, wanted
                break
        used += tokens
        found.append(cap)
    return found


def supply_tokens_per_s(instance: Instance, pricing: Pricing) -> float:
    """An instance full of typical requests: of the steps of a block one recomputes, the others,
    one a token at worst, are cache steps."""
    degree, info = tp_degree(instance), instance.info
    block_length = info.block_length if info is not None else 32
    n_rows = max(instance.token_budget // TYPICAL_TOKENS, 1)
    n_full = n_rows * min(TYPICAL_TOKENS, instance.token_budget)
    if cache_mode(instance) == "none":
        sizes = range(block_length, instance.token_budget + 1, block_length)
        return max(n / pricing.seconds(degree, n) for n in sizes)
    n_cache, n_steps = n_rows * block_length, block_length - 1
    tokens = n_cache * n_steps + n_full
    seconds = pricing.seconds(degree, n_cache) * n_steps + pricing.seconds(degree, n_full)
    return tokens / seconds
