"""What the predictor sees of a request: the eleven features of the paper (section 3.2.3), by name.

Pure: raw progress and confidences in, numbers out. Knows no model and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dilaserve.messages import NOTHING_COMPUTED, StepQuestion
from dilaserve.recording import RecordedStep

__all__ = [
    "CONFIDENCES",
    "FEATURES",
    "FULL_UNMASK_PROGRESS",
    "OUTPUT_LENGTH",
    "THRESHOLD",
    "Floats",
    "feature_matrix",
    "state_after",
    "state_before",
]

Floats: TypeAlias = npt.NDArray[np.float64]

CONFIDENCES = (
    "output_min_confidence",
    "output_q25_confidence",
    "output_median_confidence",
    "output_avg_confidence",
    "output_q75_confidence",
)
"""Over all output positions, each as of the last step that computed it."""
FEATURES = (
    "full_progress",  # (steps run + 1) / output length
    "full_unmask_progress",  # unmasked tokens / output length
    "block_progress",  # index of the next step's block / number of blocks
    "block_unmask_progress",  # unmasked tokens of that block / its size
    "confidence_threshold",  # the candidate, not what the steps so far were run with
    *CONFIDENCES,
    "output_length",
)
"""In the order of the columns."""
N_FEATURES = len(FEATURES)
FULL_UNMASK_PROGRESS = FEATURES.index("full_unmask_progress")
THRESHOLD = FEATURES.index("confidence_threshold")
OUTPUT_LENGTH = FEATURES.index("output_length")


def feature_matrix(states: Sequence[StepQuestion], thresholds: Sequence[float]) -> Floats:
    """(states × thresholds, 11): for each state one row per candidate threshold, in their order."""
    raw = np.array([_raw(state) for state in states], dtype=np.float64).reshape(-1, N_FEATURES)
    rows = np.repeat(_scaled(raw), len(thresholds), axis=0)
    rows[:, THRESHOLD] = np.tile(np.asarray(thresholds, dtype=np.float64), len(states))
    return rows


def state_before(run: Sequence[RecordedStep]) -> StepQuestion:
    """A run before its first step: no confidence is known."""
    first = run[0]
    return StepQuestion(
        request_id=first.run_id,
        step=0,
        n_output=first.n_output,
        block_length=first.block_length,
        n_unmasked=0,
        block=0,
        n_block_masked=min(first.block_length, first.n_output),
        confidence=NOTHING_COMPUTED,
    )


def state_after(step: RecordedStep) -> StepQuestion:
    """A run as one of its steps left it, as the scheduler would ask about it: `block` is the one
    that the next step works on."""
    block, n_masked = step.block, step.n_block_masked
    if n_masked == 0 and (block + 1) * step.block_length < step.n_output:
        block += 1
        n_masked = min(step.block_length, step.n_output - block * step.block_length)
    return StepQuestion(
        request_id=step.run_id,
        step=step.step,
        n_output=step.n_output,
        block_length=step.block_length,
        n_unmasked=step.n_unmasked,
        block=block,
        n_block_masked=n_masked,
        confidence=step.confidence,
    )


def _raw(state: StepQuestion) -> tuple[float, ...]:
    confidence = state.confidence
    return (
        state.step,
        state.n_unmasked,
        state.block,
        state.n_block_masked,
        state.block_length,
        confidence.min,
        confidence.q25,
        confidence.median,
        confidence.mean,
        confidence.q75,
        state.n_output,
    )


def _scaled(raw: Floats) -> Floats:
    """Rows of `_raw` → rows of FEATURES, the threshold still open."""
    step, n_unmasked, block, n_block_masked, block_length = raw.T[:5]
    n_output = np.maximum(raw[:, -1], 1.0)
    block_length = np.maximum(block_length, 1.0)
    n_blocks = np.ceil(n_output / block_length)
    block_size = np.clip(n_output - block * block_length, 1.0, block_length)
    rows = raw.copy()
    rows[:, 0] = (step + 1.0) / n_output
    rows[:, 1] = n_unmasked / n_output
    rows[:, 2] = block / n_blocks
    rows[:, 3] = 1.0 - n_block_masked / block_size
    rows[:, THRESHOLD] = 0.0
    return rows
