"""Seconds of a pass by what it is made of, from a latency profile that tells step kinds and keys
apart; else by its tokens alone. Knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from dilaserve.messages import StepKind
from dilaserve.profiles import LatencyCurve, LatencyProfile, Point

__all__ = ["PassCurves"]

KINDS: tuple[StepKind, StepKind] = "cache", "recompute"


class PassCurves:
    """Of one TP degree. Every curve is smoothed, and never falls with the tokens of a pass."""

    def __init__(self, profile: LatencyProfile) -> None:
        self.mixed = profile.curve()
        """Over all points, whatever their kind."""
        points = {kind: [p for p in profile.points if p.kind == kind] for kind in KINDS}
        self.tells_kinds = all(points.values())
        """Whether both kinds were measured, so that what a pass is made of matters."""
        self._by_kind = {kind: _ByKeys(own) for kind, own in points.items() if self.tells_kinds}

    def seconds(
        self, n_tokens: int, n_full: int | None = None, n_keys: float | None = None
    ) -> float:
        """Of a pass over `n_tokens` tokens, `n_full` of them in rows that compute their whole
        length (None: not known), where each row sees `n_keys` keys (None: not known).

        A mixed pass lies between a pass of each kind over as many tokens, by its share of tokens.
        """
        if n_full is None or n_tokens == 0 or not self.tells_kinds:
            return self.mixed.seconds(n_tokens)
        full_share = min(n_full / n_tokens, 1.0)
        cache, full = (self._by_kind[kind].seconds(n_tokens, n_keys) for kind in KINDS)
        return cache + full_share * (full - cache)


class _ByKeys:
    """Passes of one kind: a curve for each number of keys that was measured."""

    def __init__(self, points: list[Point]) -> None:
        self._all = _curve(points)
        self._n_keys = sorted({p.n_keys for p in points if p.n_keys is not None})
        self._curves = [_curve(p for p in points if p.n_keys == n) for n in self._n_keys]

    def seconds(self, n_tokens: int, n_keys: float | None) -> float:
        """Linear between the two nearest numbers of keys; beyond the ends, as at the end."""
        if n_keys is None or not self._n_keys:
            return self._all.seconds(n_tokens)
        above = bisect_left(self._n_keys, n_keys)
        if above == 0 or above == len(self._n_keys):
            return self._curves[max(above - 1, 0)].seconds(n_tokens)
        low, high = self._n_keys[above - 1 : above + 1]
        low_s, high_s = (curve.seconds(n_tokens) for curve in self._curves[above - 1 : above + 1])
        return low_s + (n_keys - low) / (high - low) * (high_s - low_s)


def _curve(points: Iterable[Point]) -> LatencyCurve:
    return LatencyCurve((p.n_tokens, p.seconds) for p in points)
