"""How full passes are when rows that recompute are put off until few enough do so together.

A pass that computes a whole length hides the cost of its cache rows, and two such rows in one pass
leave another pass without any. Pure functions; knows no latency and no request.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

__all__ = ["Load", "Loads", "loads"]

Load = tuple[int, int, float]
"""(rows that recompute, rows from a cache, probability) of a pass."""
Loads = tuple[Load, ...]

NEGLIGIBLE = 1e-6
N_SQUARINGS = 10
"""Of the transition matrix: 1,024 passes from any beginning on."""


@lru_cache(maxsize=4096)
def loads(n_rows: int, share: float, n_together: int) -> Loads:
    """Of the passes of an instance with `n_rows` requests each of whose steps is, with probability
    `share`, the first of a block. At most `n_together` of these run in one pass; the others wait.
    Unlikely passes are left out."""
    due = _binomial(n_rows, share) if n_together >= n_rows else _due(n_rows, share, n_together)
    kept = [(n, chance) for n, chance in enumerate(due) if chance > NEGLIGIBLE]
    total = sum(chance for _, chance in kept)
    return tuple((min(n, n_together), n_rows - n, chance / total) for n, chance in kept)


def _due(n_rows: int, share: float, n_together: int) -> list[float]:
    """Probabilities that so many rows are at the start of a block: the stationary distribution of
    the chain in which those that run may come to another one, and those put off still are."""
    size = n_rows + 1
    chain = np.zeros((size, size))
    chain[: n_together + 1] = _binomial(n_rows, share)
    for n in range(n_together + 1, size):
        put_off = n - n_together
        chain[n, put_off:] = _binomial(n_rows - put_off, share)
    for _ in range(N_SQUARINGS):
        chain = chain @ chain
    due: list[float] = chain[0].tolist()
    return due


def _binomial(n: int, p: float) -> list[float]:
    chances, others = _powers(p, n), _powers(1.0 - p, n)
    return [math.comb(n, k) * chances[k] * others[n - k] for k in range(n + 1)]


@lru_cache(maxsize=64)
def _powers(p: float, n: int) -> list[float]:
    return [p**k for k in range(n + 1)]
