"""Seconds of a forward pass by TP degree: from a latency profile, learned from what passes took.

Knows no request: a batch is so many rows and tokens. Where the profile tells step kinds and keys
apart, a pass is priced by what it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilaserve.pass_curves import PassCurves
from dilaserve.profiles import ProfileSet
from dilaserve_scheduler.policies.packing import loads

__all__ = ["MANY", "Batch", "Line", "Pricing", "Split"]

SPAN = 200.0
"""Passes after which what was learned has faded by 1/e."""
N_WARMING = 10
"""First passes, which fade at once: they are those in which everything is set up."""
FIRST_PASS_S = 0.1
"""Before anything is known."""
MANY = 1 << 30
"""More rows than any pass has: no limit."""
N_SHARES = 256
"""Resolution of the share of recompute rows in a batch."""
N_SIZE = 16
"""Resolution of a batch's full length, in tokens."""


@dataclass(slots=True)  # one for each pass: frozen, it would take twice as long
class Batch:
    """The requests of an instance: of the steps of `n_rows` rows a `recompute_share` compute
    `n_full` tokens, the others `n_cache`. At most `n_together` recompute in one pass."""

    n_rows: int
    n_full: float
    n_cache: float
    recompute_share: float
    n_together: int = MANY


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
        self._curves: dict[int, PassCurves | None] = {}
        self._lines: dict[int, Line] = {}
        self._seen: dict[int, tuple[int, float, float]] = {}
        self._means: dict[tuple[int, int, int, int, int, int], float] = {}

    def observe(
        self, degree: int, n_tokens: int, seconds: float, *, n_full: int | None = None
    ) -> None:
        """A pass of an instance of this degree took so long; `n_full`: tokens of its rows that
        computed their whole length, where that is known."""
        curve = self._curve(degree)
        if curve is None:
            self._line(degree).observe(n_tokens, seconds)
        elif self._overhead is None:
            n, taken, expected = self._seen.get(degree, (0, 0.0, 0.0))
            keep = _keep(n)
            expected = keep * expected + curve.seconds(n_tokens, n_full)
            self._seen[degree] = n + 1, keep * taken + seconds, expected

    def seconds(self, degree: int, n_tokens: int, *, n_full: int | None = None) -> float:
        """Of a pass over exactly so many tokens; `n_full`: see `observe`."""
        curve = self._curve(degree)
        if curve is None:
            return self._line(degree).seconds(n_tokens)
        return self.overhead(degree) * curve.seconds(n_tokens, n_full)

    def mean_s(self, degree: int, batch: Batch) -> float:
        """Between two steps of a request in such a batch, on average: a pass, and the part of one
        for which those are put off that may not recompute yet."""
        curve = self._curve(degree)
        if curve is None:
            n_row = batch.n_cache + batch.recompute_share * (batch.n_full - batch.n_cache)
            return self._line(degree).seconds(batch.n_rows * n_row)
        share = round(batch.recompute_share * N_SHARES)
        n_full = round(batch.n_full / N_SIZE)
        n_cache = round(batch.n_cache)
        key = (degree, batch.n_rows, n_full, n_cache, share, batch.n_together)
        mean = self._means.get(key)
        if mean is None:
            full = max(n_full * N_SIZE, n_cache)
            rounded = Batch(batch.n_rows, full, n_cache, share / N_SHARES, batch.n_together)
            sizes = _sizes(rounded)
            pass_s = sum(
                chance * curve.seconds(n_tokens, n_recomputed, full)
                for n_tokens, n_recomputed, _, chance in sizes
            )
            mean = self._means[key] = pass_s * batch.n_rows / _mean_rows(sizes)
        return self.overhead(degree) * mean

    def split(self, degree: int, batch: Batch) -> Split:
        """How the seconds of such a batch's passes follow from rows and tokens, near it."""
        curve = self._curve(degree)
        sizes = _sizes(batch)
        mean_n = sum(chance * n for n, _, _, chance in sizes)
        seconds = [
            (n, chance, self._at(degree, curve, n, n_recomputed, batch.n_full))
            for n, n_recomputed, _, chance in sizes
        ]
        mean_s = sum(chance * s for _, chance, s in seconds)
        variance = sum(chance * (n - mean_n) ** 2 for n, chance, _ in seconds)
        covariance = sum(chance * (n - mean_n) * (s - mean_s) for n, chance, s in seconds)
        token_s = min(max(covariance / variance, 0.0), mean_s / mean_n) if variance else 0.0
        return Split(row_s=(mean_s - token_s * mean_n) / _mean_rows(sizes), token_s=token_s)

    def overhead(self, degree: int) -> float:
        """The factor on the profile: given, or learned so far."""
        if self._overhead is not None:
            return self._overhead
        _, taken, expected = self._seen.get(degree, (0, 1.0, 1.0))
        return taken / expected

    def _at(
        self,
        degree: int,
        curve: PassCurves | None,
        n_tokens: int,
        n_recomputed: int,
        n_keys: float,
    ) -> float:
        if curve is None:
            return self._line(degree).seconds(n_tokens)
        return self.overhead(degree) * curve.seconds(n_tokens, n_recomputed, n_keys)

    def _curve(self, degree: int) -> PassCurves | None:
        try:
            return self._curves[degree]
        except KeyError:
            profiles = self._profiles
            known = profiles is not None and degree in profiles.tp_degrees
            curve = PassCurves(profiles.of_degree(degree)) if profiles and known else None
            self._curves[degree] = curve
            return curve

    def _line(self, degree: int) -> Line:
        return self._lines.setdefault(degree, Line())


def _keep(n_before: int) -> float:
    """What an observation leaves of the weight of those before it."""
    return 0.5 if n_before < N_WARMING else 1.0 - 1.0 / SPAN


def _sizes(batch: Batch) -> list[tuple[int, int, int, float]]:
    """(tokens, those in rows that recompute, rows, probability) of a pass."""
    together = min(batch.n_together, batch.n_rows)
    return [
        (
            round(n_full * batch.n_full + n_cache * batch.n_cache),
            round(n_full * batch.n_full),
            n_full + n_cache,
            chance,
        )
        for n_full, n_cache, chance in loads(batch.n_rows, batch.recompute_share, together)
    ]


def _mean_rows(sizes: list[tuple[int, int, int, float]]) -> float:
    return sum(chance * n_rows for _, _, n_rows, chance in sizes)
