"""How long a pass takes on a stack, as a line through what was seen."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from dilaserve.errors import DiLaServeError
from dilaserve_bench.live.passes import Turn
from dilaserve_bench.twin.engine import VirtualPlan

__all__ = ["PassFit", "fit_passes", "least_squares"]

FEWEST = 50
FAR_SHARE = 0.002
"""Of the turns, the longest: somebody else had the core. Left out."""


class PassFit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a pass, with all that the worker does beside it: a sum of these. None below 0."""

    base_s: float
    token_s: float
    row_s: float
    new_row_s: float
    """Of a request in its first step: it was loaded for this pass."""
    n_turns: int
    mean_s: float
    left_s: float
    """Standard deviation of what the line leaves over."""

    def seconds(self, plan: VirtualPlan) -> float:
        """Of a pass of the twin."""
        n_new = sum(row.sequence.step == 0 for row in plan.rows)
        return self.of(plan.n_tokens, len(plan.rows), n_new)

    def of(self, n_tokens: int, n_rows: int, n_new: int) -> float:
        """Of a pass of these sizes."""
        return self.base_s + self.token_s * n_tokens + self.row_s * n_rows + self.new_row_s * n_new


def fit_passes(turns: Sequence[Turn]) -> PassFit:
    """Least squares. Raises DiLaServeError when there are too few."""
    if len(turns) < FEWEST:
        raise DiLaServeError(
            f"only {len(turns)} passes followed one another, and {FEWEST} are needed to fit the "
            "twin; drive the stack for longer"
        )
    kept = sorted(turns, key=lambda turn: turn.seconds)[: round(len(turns) * (1 - FAR_SHARE))]
    sizes = [[1, turn.seen.n_tokens, turn.seen.n_rows, turn.seen.n_new] for turn in kept]
    x, y = np.array(sizes, dtype=float), np.array([turn.seconds for turn in kept])
    found = least_squares(x, y)
    base_s, token_s, row_s, new_row_s = found.tolist()
    return PassFit(
        base_s=base_s,
        token_s=token_s,
        row_s=row_s,
        new_row_s=new_row_s,
        n_turns=len(kept),
        mean_s=float(y.mean()),
        left_s=float((y - x @ found).std()),
    )


def least_squares(
    x: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    y: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Coefficients of the columns of `x`, none below 0: the lowest goes while there is one."""
    columns = list(range(x.shape[1]))
    while True:
        found = np.linalg.lstsq(x[:, columns], y)[0]
        if found.min(initial=0.0) >= 0.0:
            result = np.zeros(x.shape[1])
            result[columns] = found
            return result
        del columns[int(found.argmin())]
