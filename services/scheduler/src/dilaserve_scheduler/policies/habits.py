"""How many steps a token takes by threshold, on average: the one-shot estimate (paper 3.2.3).

Starts from what is assumed and learns from every step that is served. Knows no single request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["Habits"]

PRIOR_TOKENS = 2048.0
"""Tokens that what was assumed weighs as much as, for each threshold and for the model at large."""


class Habits:
    """One table per model. A threshold that was not seen is scaled as the others are."""

    def __init__(self, thresholds: Sequence[float], assumed: Mapping[float, float]) -> None:
        self._index = {threshold: k for k, threshold in enumerate(thresholds)}
        self._assumed = [_interpolate(assumed, threshold) for threshold in thresholds]
        self._n_steps = [0] * len(thresholds)
        self._n_tokens = [0] * len(thresholds)
        self.steps_per_token = list(self._assumed)
        """By candidate threshold, as of the last `learn`."""

    def observe(self, threshold: float, n_new: int) -> None:
        """A step at this threshold unmasked so many tokens of a request."""
        k = self._index.get(threshold)
        if k is not None:
            self._n_steps[k] += 1
            self._n_tokens[k] += n_new

    def learn(self) -> None:
        """Bring the table up to date."""
        expected = sum(n * a for n, a in zip(self._n_tokens, self._assumed, strict=True))
        prior = PRIOR_TOKENS * sum(self._assumed) / len(self._assumed)
        scale = (sum(self._n_steps) + prior) / (expected + prior)
        self.steps_per_token = [
            (steps + PRIOR_TOKENS * scale * assumed) / (tokens + PRIOR_TOKENS)
            for steps, tokens, assumed in zip(
                self._n_steps, self._n_tokens, self._assumed, strict=True
            )
        ]

    def steps(self, n_tokens: float, n_blocks: int) -> list[float]:
        """To unmask so many tokens in so many blocks, by threshold: at least one a block, at most
        one a token."""
        return [
            min(max(each * n_tokens, float(n_blocks)), max(n_tokens, 1.0))
            for each in self.steps_per_token
        ]


def _interpolate(table: Mapping[float, float], x: float) -> float:
    xs = sorted(table)
    right = bisect_left(xs, x)
    if right == 0:
        return table[xs[0]]
    if right == len(xs):
        return table[xs[-1]]
    low, high = xs[right - 1], xs[right]
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)
