"""Differences between two ways of answering the same problems, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

__all__ = ["Difference", "mean_of", "paired", "paired_excess"]

Z_975 = 1.96


class Difference(msgspec.Struct, frozen=True):
    """A mean, and half the width of its 95 % interval; both in shares of 1."""

    mean: float
    ci95: float


def paired(first: Sequence[bool], second: Sequence[bool]) -> Difference:
    """How much more often the first is right than the second, on the same problems."""
    return mean_of([float(a) - float(b) for a, b in zip(first, second, strict=True)])


def paired_excess(
    best: Sequence[bool], ours: Sequence[bool], worst: Sequence[bool], *, share: float
) -> Difference:
    """By how much what `ours` loses against `best` exceeds a share of what `worst` loses."""
    return mean_of(
        [
            (float(b) - float(o)) - share * (float(b) - float(w))
            for b, o, w in zip(best, ours, worst, strict=True)
        ]
    )


def mean_of(values: Sequence[float]) -> Difference:
    """Of independent values, by the normal approximation; there have to be many."""
    n, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(n - 1, 1)
    return Difference(mean, Z_975 * math.sqrt(variance / n))
