"""How many steps a token takes by threshold, on average: the one-shot estimate (paper 3.2.3).

Starts from what is assumed and learns from requests that were served. Knows no single request's
future.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["Habits", "interpolate"]

PRIOR_TOKENS = 2048.0
"""Tokens seen that weigh as much as what was assumed of this very model, for each threshold and for
the model at large."""
GUESS_TOKENS = 256.0
"""The same of what was assumed for want of anything better."""
ENOUGH_TOKENS = 2048.0
"""Tokens seen from which on a model is known."""
PRIOR_STEPS = 4.0
"""Steps that the belief that a request is like the others weighs as much as."""


class Habits:
    """One table per model. A threshold that was not seen is scaled as the others are.

    Slow requests are run at low thresholds more often than others, which must not make these look
    slow: so each request counts relative to its own pace.
    """

    def __init__(
        self,
        thresholds: Sequence[float],
        assumed: Mapping[float, float],
        *,
        is_guess: bool = False,
    ) -> None:
        """`is_guess`: whether `assumed` is of another model, for all that is known."""
        self._prior = GUESS_TOKENS if is_guess else PRIOR_TOKENS
        self._is_guess = is_guess
        self._n_foretold = 0
        self._index = {threshold: k for k, threshold in enumerate(thresholds)}
        self._assumed = [interpolate(assumed, threshold) for threshold in thresholds]
        self._courses: dict[str, tuple[list[int], list[int]]] = {}
        self._relative = list(self._assumed)
        """What thresholds need beside each other, on the scale of what was assumed."""
        self._total_steps = self._total_expected = 0.0
        self._n_steps = [0.0] * len(thresholds)
        self._n_tokens = [0.0] * len(thresholds)
        self.steps_per_token = list(self._assumed)
        """By candidate threshold, as of the last `learn`."""

    def observe(self, request_id: str, threshold: float, n_new: int) -> None:
        """A step at this threshold unmasked so many tokens of a request."""
        k = self._index.get(threshold)
        if k is not None:
            steps, tokens = self._course(request_id)
            steps[k] += 1
            tokens[k] += n_new

    def complete(self, request_id: str, threshold: float, *, n_steps: int, n_tokens: int) -> None:
        """A request has ended after so many steps: those not observed were run at this threshold,
        and made so many tokens of output unneeded, or unmasked them."""
        k = self._index.get(threshold)
        if k is not None:
            steps, tokens = self._course(request_id)
            steps[k] += n_steps - sum(steps)
            tokens[k] += n_tokens - sum(tokens)

    @property
    def is_new(self) -> bool:
        """Whether nothing is known of the model but a guess, and little was seen of it yet."""
        return self._is_guess and sum(self._n_tokens) < ENOUGH_TOKENS

    def foretold(self, steps: Sequence[float], n_tokens: float) -> None:
        """What a predictor says of a request that has just come, by candidate: the mean of such
        words is assumed instead of the guess."""
        self._n_foretold += 1
        self._assumed = [
            before + (each / n_tokens - before) / self._n_foretold
            for before, each in zip(self._assumed, steps, strict=True)
        ]
        self.learn()

    def ended(self, request_id: str, *, finished: bool) -> None:
        """Learn from a request, if it was served to its end."""
        course = self._courses.pop(request_id, None)
        if course is None or not finished:
            return
        steps, tokens = course
        expected = _expected(tokens, self._relative)
        self._total_steps += sum(steps)
        self._total_expected += expected
        pace = (sum(steps) + PRIOR_STEPS) / (expected + PRIOR_STEPS)
        for k, n_tokens in enumerate(tokens):
            self._n_steps[k] += steps[k] / pace
            self._n_tokens[k] += n_tokens

    def learn(self) -> None:
        """Bring the table up to date."""
        self._relative = [
            (steps + self._prior * assumed) / (tokens + self._prior)
            for steps, tokens, assumed in zip(
                self._n_steps, self._n_tokens, self._assumed, strict=True
            )
        ]
        prior = self._prior * sum(self._assumed) / len(self._assumed)
        scale = (self._total_steps + prior) / (self._total_expected + prior)
        self.steps_per_token = [scale * each for each in self._relative]

    def steps(self, n_tokens: float, n_blocks: int) -> list[float]:
        """To unmask so many tokens in so many blocks, by threshold: at least one a block, at most
        one a token."""
        return [
            min(max(each * n_tokens, float(n_blocks)), max(n_tokens, 1.0))
            for each in self.steps_per_token
        ]

    def _course(self, request_id: str) -> tuple[list[int], list[int]]:
        """Steps and tokens so far, by candidate."""
        course = self._courses.get(request_id)
        if course is None:
            zeros = [0] * len(self._assumed)
            course = self._courses[request_id] = (zeros, list(zeros))
        return course


def interpolate(table: Mapping[float, float], x: float) -> float:
    """Linear between the points, constant beyond them."""
    xs = sorted(table)
    right = bisect_left(xs, x)
    if right == 0:
        return table[xs[0]]
    if right == len(xs):
        return table[xs[-1]]
    low, high = xs[right - 1], xs[right]
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)


def _expected(tokens: Sequence[float], steps_per_token: Sequence[float]) -> float:
    return sum(n * each for n, each in zip(tokens, steps_per_token, strict=True))
