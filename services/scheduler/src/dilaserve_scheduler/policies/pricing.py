"""Seconds of a forward pass by TP degree: from a latency profile, learned from what passes took.

Knows no request: a batch is so many rows and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilaserve.profiles import LatencyCurve, ProfileSet

__all__ = ["Batch", "Line", "Pricing", "Split"]

SPAN = 200.0
"""Passes after which what was learned has faded by 1/e."""
N_WARMING = 10
"""First passes, which fade at once: they are those in which everything is set up."""
FIRST_PASS_S = 0.1
"""Before anything is known."""
N_SHARES = 64
"""Resolution of the share of recompute rows in a batch."""
N_SIZE = 16
"""Resolution of a batch's full length, in tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The typical pass of an instance: of `n_rows` rows each recomputes with probability
    `recompute_share`, and then computes `n_full` tokens, else `n_cache`."""

    n_rows: int
    n_full: float
    n_cache: float
    recompute_share: float


@dataclass(frozen=True, slots=True)
class Split:
    """What a pass costs, shared out: every row pays `row_s`, every token `token_s`."""

    row_s: float
    token_s: float


class Line:
    """Seconds = a + b × tokens, fitted to passes by least squares; older ones fade."""

    def __init__(self) -> None:
        self._n = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._a, self._b = FIRST_PASS_S, 0.0

    def observe(self, n_tokens: int, seconds: float) -> None:
        """A pass took so long."""
        keep, self._n = _keep(self._n), self._n + 1
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + n_tokens
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + n_tokens * n_tokens
        self._xy = keep * self._xy + n_tokens * seconds
        self._fit()

    def seconds(self, n_tokens: float) -> float:
        """Of a pass."""
        return self._a + self._b * n_tokens

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = covariance / variance if variance > 1e-6 * mean_x * mean_x else 0.0
        # Neither may a pass get cheaper by tokens, nor an empty one cost less than nothing.
        self._b = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        self._a = mean_y - self._b * mean_x


class Pricing:
    """L_d, times the overhead: what a system loses outside of the profiled pass.

    `overhead` None: learned per degree from passes. A degree without a profile: a line, learned.
    """

    def __init__(self, profiles: ProfileSet | None, overhead: float | None) -> None:
        self._profiles = profiles
        self._overhead = overhead
        self._curves: dict[int, LatencyCurve | None] = {}
        self._lines: dict[int, Line] = {}
        self._seen: dict[int, tuple[int, float, float]] = {}
        self._means: dict[tuple[int, int, int, int, int], float] = {}

    def observe(self, degree: int, n_tokens: int, seconds: float) -> None:
        """A pass of an instance of this degree took so long."""
        curve = self._curve(degree)
        if curve is None:
            self._line(degree).observe(n_tokens, seconds)
        elif self._overhead is None:
            n, taken, expected = self._seen.get(degree, (0, 0.0, 0.0))
            keep = _keep(n)
            expected = keep * expected + curve.seconds(n_tokens)
            self._seen[degree] = n + 1, keep * taken + seconds, expected

    def seconds(self, degree: int, n_tokens: int) -> float:
        """Of a pass over exactly so many tokens."""
        curve = self._curve(degree)
        if curve is None:
            return self._line(degree).seconds(n_tokens)
        return self.overhead(degree) * curve.seconds(n_tokens)

    def mean_s(self, degree: int, batch: Batch) -> float:
        """Of the mean pass of an instance with such a batch: rows recompute independently."""
        curve = self._curve(degree)
        if curve is None:
            n_row = batch.n_cache + batch.recompute_share * (batch.n_full - batch.n_cache)
            return self._line(degree).seconds(batch.n_rows * n_row)
        share = round(batch.recompute_share * N_SHARES)
        n_full = round(batch.n_full / N_SIZE)
        n_cache = round(batch.n_cache)
        key = (degree, batch.n_rows, n_full, n_cache, share)
        mean = self._means.get(key)
        if mean is None:
            rounded = max(n_full * N_SIZE, n_cache)
            sizes = _sizes(batch.n_rows, rounded, n_cache, share / N_SHARES)
            mean = sum(chance * curve.seconds(n_tokens) for n_tokens, chance in sizes)
            self._means[key] = mean
        return self.overhead(degree) * mean

    def split(self, degree: int, batch: Batch) -> Split:
        """How the seconds of such a batch's passes follow from rows and tokens, near it."""
        curve = self._curve(degree)
        sizes = _sizes(batch.n_rows, batch.n_full, batch.n_cache, batch.recompute_share)
        mean_n = sum(chance * n for n, chance in sizes)
        seconds = [(n, chance, self._at(degree, curve, n)) for n, chance in sizes]
        mean_s = sum(chance * s for _, chance, s in seconds)
        variance = sum(chance * (n - mean_n) ** 2 for n, chance, _ in seconds)
        covariance = sum(chance * (n - mean_n) * (s - mean_s) for n, chance, s in seconds)
        token_s = min(max(covariance / variance, 0.0), mean_s / mean_n) if variance else 0.0
        return Split(row_s=(mean_s - token_s * mean_n) / batch.n_rows, token_s=token_s)

    def overhead(self, degree: int) -> float:
        """The factor on the profile: given, or learned so far."""
        if self._overhead is not None:
            return self._overhead
        _, taken, expected = self._seen.get(degree, (0, 1.0, 1.0))
        return taken / expected

    def _at(self, degree: int, curve: LatencyCurve | None, n_tokens: float) -> float:
        if curve is None:
            return self._line(degree).seconds(n_tokens)
        return self.overhead(degree) * curve.seconds(round(n_tokens))

    def _curve(self, degree: int) -> LatencyCurve | None:
        if degree not in self._curves:
            profiles = self._profiles
            known = profiles is not None and degree in profiles.tp_degrees
            self._curves[degree] = profiles.curve(degree) if profiles and known else None
        return self._curves[degree]

    def _line(self, degree: int) -> Line:
        return self._lines.setdefault(degree, Line())


def _keep(n_before: int) -> float:
    """What an observation leaves of the weight of those before it."""
    return 0.5 if n_before < N_WARMING else 1.0 - 1.0 / SPAN


def _sizes(n_rows: int, n_full: float, n_cache: float, share: float) -> list[tuple[int, float]]:
    """(tokens of a pass, probability) for 0, 1, … recomputing rows; improbable tails left out."""
    sizes: list[tuple[int, float]] = []
    total = 0.0
    for n in range(n_rows + 1):
        chance = math.comb(n_rows, n) * share**n * (1.0 - share) ** (n_rows - n)
        sizes.append((round(n_rows * n_cache + n * (n_full - n_cache)), chance))
        total += chance
        if total > 1.0 - 1e-6:
            break
    return [(n_tokens, chance / total) for n_tokens, chance in sizes]
