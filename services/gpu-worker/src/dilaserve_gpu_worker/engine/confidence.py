"""Statistics of confidences over outputs of different lengths, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dilaserve.messages import ConfidenceStats


def confidence_stats(outputs: Sequence[npt.NDArray[np.float64]]) -> list[ConfidenceStats]:
    """Minimum, quartiles (linear interpolation) and mean of each array; none is empty."""
    if not outputs:
        return []
    lengths = np.array([len(output) for output in outputs])
    padded = np.full((len(outputs), lengths.max()), np.inf)
    for row, output in zip(padded, outputs, strict=True):
        row[: len(output)] = output
    padded.sort(axis=1)
    means = [float(np.add.reduce(output)) / len(output) for output in outputs]  # mean() is slow
    columns = (
        padded[:, 0].tolist(),
        _quantile(padded, lengths, 0.25),
        _quantile(padded, lengths, 0.5),
        means,
        _quantile(padded, lengths, 0.75),
    )
    return [
        ConfidenceStats(min=least, q25=q25, median=median, mean=mean, q75=q75)
        for least, q25, median, mean, q75 in zip(*columns, strict=True)
    ]


def _quantile(
    ordered: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64], q: float
) -> list[float]:
    at = (lengths - 1) * q
    below = np.floor(at).astype(np.int64)
    rows = np.arange(len(lengths))
    low = ordered[rows, below]
    high = ordered[rows, np.minimum(below + 1, lengths - 1)]
    quantiles: list[float] = (low + (high - low) * (at - below)).tolist()
    return quantiles
