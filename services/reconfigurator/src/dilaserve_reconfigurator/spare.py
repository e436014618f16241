"""GPUs that a plan does not need: they strengthen the degrees that carry the load.

Stage 1 says how few instances suffice. Idle GPUs help nobody, while one more instance where work
is makes its batches smaller and its queues shorter, which the program does not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["fill", "fits", "only"]

ROUNDING = 1e-6


def fill(nodes: Sequence[int], loads: Mapping[int, float]) -> dict[int, int]:
    """Instances by TP degree on nodes of so many GPUs: enough for the loads (instances' worth of
    work), then one after the other for the degree that is the fullest and still fits. What is left
    takes the largest that fits."""
    counts = {degree: math.ceil(load - ROUNDING) for degree, load in loads.items()}
    while True:
        open_to = [d for d in counts if fits(nodes, {**counts, d: counts[d] + 1})]
        if not open_to:
            return counts
        busy = [d for d in open_to if loads[d] > ROUNDING]
        counts[max(busy, key=lambda d: loads[d] / counts[d]) if busy else max(open_to)] += 1


def fits(nodes: Sequence[int], counts: Mapping[int, int]) -> bool:
    """Whether the nodes have room. Exact for degrees that divide one another."""
    return all(
        sum(d // degree * n for d, n in counts.items() if d >= degree)
        <= sum(n_gpus // degree for n_gpus in nodes)
        for degree in counts
    )


def only(nodes: Sequence[int], degrees: Sequence[int], degree: int) -> dict[int, int]:
    """As many instances of one degree as there is room for, none of the others."""
    return {d: sum(n // d for n in nodes) if d == degree else 0 for d in degrees}
