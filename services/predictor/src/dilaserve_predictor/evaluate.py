"""What predictions are worth: pooled errors, the one-shot estimate they are held against, and how
seldom they may be refreshed (paper section 3.2.3, Figures 6 and 7). Knows no trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dilaserve_predictor.examples import Booleans, Examples
from dilaserve_predictor.features import Floats
from dilaserve_predictor.model import FEWEST_STEPS

__all__ = [
    "GRANULARITIES",
    "TOLERANCE",
    "coarsest",
    "granularity",
    "one_shot",
    "refreshed",
    "wmape",
]

GRANULARITIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOLERANCE = 1.05
"""The paper's rule: errors may grow to this multiple of those with a prediction at each token."""


def wmape(predicted: Floats, truth: Floats) -> float:
    """Sum of absolute errors over sum of truths; NaN for no truths."""
    total = float(truth.sum())
    return float(np.abs(predicted - truth).sum()) / total if total else float("nan")


def steps_per_token(training: Examples) -> dict[float, float]:
    """Mean over runs of steps by output length, by threshold."""
    arrivals = training.where(training.step == 0)
    per_token = arrivals.steps_left / arrivals.n_output
    return {
        threshold: float(per_token[arrivals.thresholds == threshold].mean())
        for threshold in sorted(set(arrivals.thresholds.tolist()))
    }


def one_shot(training: Examples, asked: Examples) -> Floats:
    """The estimate made at arrival: mean steps per output token by threshold, times the output
    length, less the steps run since. A threshold never seen counts as the mean of all."""
    by_threshold = steps_per_token(training)
    overall = sum(by_threshold.values()) / max(len(by_threshold), 1)
    means = np.array([by_threshold.get(t, overall) for t in asked.thresholds.tolist()])
    return np.maximum(means * asked.n_output - asked.step, FEWEST_STEPS)


def refreshed(examples: Examples, predicted: Floats, every_tokens: int) -> Floats:
    """What the scheduler knows at each state when it takes a new prediction only after so many
    newly unmasked tokens: between two, a prediction shrinks with the tokens that are left."""
    known = np.empty_like(predicted)
    unmasked = examples.n_unmasked
    left = np.maximum(examples.n_output - unmasked, 1.0)
    runs, anchor = examples.run, 0
    for now in range(len(examples)):
        is_new = now == 0 or runs[now] != runs[now - 1]
        if is_new or unmasked[now] - unmasked[anchor] >= every_tokens:
            anchor = now
        known[now] = max(predicted[anchor] * left[now] / left[anchor], FEWEST_STEPS)
    return known


def granularity(
    examples: Examples, predicted: Floats, sizes: Sequence[int] = GRANULARITIES
) -> list[tuple[int, float]]:
    """(newly unmasked tokens between two predictions, error of what is known meanwhile), over the
    states after a first step."""
    asked: Booleans = examples.is_running
    truth = examples.steps_left[asked]
    return [(n, wmape(refreshed(examples, predicted, n)[asked], truth)) for n in sizes]


def coarsest(curve: Sequence[tuple[int, float]]) -> int:
    """The largest granularity up to which the error stays within TOLERANCE of the finest's."""
    finest = curve[0][1]
    chosen = curve[0][0]
    for n_tokens, error in curve:
        if error > TOLERANCE * finest:
            break
        chosen = n_tokens
    return chosen
