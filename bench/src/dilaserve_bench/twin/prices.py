"""How long a virtual pass takes, by a latency profile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

from dilaserve.pass_curves import PassCurves
from dilaserve.profiles import LatencyProfile, ProfileSet
from dilaserve_bench.twin.engine import VirtualPlan

__all__ = ["Lookup", "PassSeconds", "profiled_seconds"]

PassSeconds = Callable[[int], Callable[[VirtualPlan], float]]
"""By TP degree: how long a pass takes."""

Lookup = Literal["smoothed", "ceil"]
"""How a pass between two measured sizes is priced. ceil: as the next larger one that was measured,
unsmoothed and whatever its kind (the published system pads its CUDA graphs)."""

KEY_STEP = 16
"""Resolution of a pass's keys a row."""


def profiled_seconds(
    profiles: ProfileSet, *, lookup: Lookup, overhead: float, max_batch_tokens: int
) -> PassSeconds:
    """As profiled, times the overhead: by the tokens of a pass, and by what its rows are where the
    profile tells step kinds apart. Raises ProfileError for a degree without a profile."""

    def of_degree(degree: int) -> Callable[[VirtualPlan], float]:
        profile = profiles.of_degree(degree)
        curves = PassCurves(profile)
        if lookup == "smoothed" and curves.tells_kinds:
            return _by_rows(curves, overhead)
        seconds = _next_measured(profile) if lookup == "ceil" else curves.mixed.seconds
        table = [overhead * seconds(n) for n in range(max_batch_tokens + 1)]
        return lambda plan: table[plan.n_tokens]

    return of_degree


def _by_rows(curves: PassCurves, overhead: float) -> Callable[[VirtualPlan], float]:
    """A row's keys weigh with its tokens: each of them attends to all of them."""
    known: dict[tuple[int, int, int], float] = {}

    def seconds(plan: VirtualPlan) -> float:
        n_full = n_pairs = 0
        for row in plan.rows:
            n_pairs += row.n_tokens * row.n_keys
            if row.kind != "cache":
                n_full += row.n_tokens
        made_of = plan.n_tokens, n_full, round(n_pairs / (KEY_STEP * plan.n_tokens))
        if made_of not in known:
            n_keys = KEY_STEP * made_of[2]
            known[made_of] = overhead * curves.seconds(plan.n_tokens, n_full, n_keys)
        return known[made_of]

    return seconds


def _next_measured(profile: LatencyProfile) -> Callable[[int], float]:
    """Of the next larger size that was measured; beyond the last, of the last."""
    points = sorted(profile.points, key=lambda point: point.n_tokens)
    sizes = [point.n_tokens for point in points]
    return lambda n: points[min(bisect_left(sizes, n), len(points) - 1)].seconds
