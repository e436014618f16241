"""Statistics of confidences over the output positions of a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dilaserve.messages import ConfidenceStats


def confidence_stats(output: npt.NDArray[np.float64]) -> ConfidenceStats:
    """Minimum, quartiles (linear interpolation) and mean of an array that is not empty."""
    ordered = output.copy()
    ordered.sort()
    q25, median, q75 = _quartiles(ordered)
    return ConfidenceStats(
        min=ordered.item(0),
        q25=q25,
        median=median,
        mean=float(np.add.reduce(output)) / len(output),  # mean() is slow
        q75=q75,
    )


def _quartiles(ordered: npt.NDArray[np.float64]) -> list[float]:
    quartiles, last = [], len(ordered) - 1
    for at in (last * 0.25, last * 0.5, last * 0.75):
        below = int(at)
        low, high = ordered.item(below), ordered.item(min(below + 1, last))
        quartiles.append(low + (high - low) * (at - below))
    return quartiles
