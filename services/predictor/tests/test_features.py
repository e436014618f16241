"""The eleven features, by name and by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dilaserve.messages import ConfidenceStats, StepQuestion
from dilaserve_predictor.features import FEATURES, feature_matrix, state_after, state_before

from .made_up import run_of

CONFIDENCE = ConfidenceStats(min=0.1, q25=0.2, median=0.3, mean=0.35, q75=0.4)


def question(**changes: object) -> StepQuestion:
    values: dict[str, object] = {
        "request_id": "r",
        "step": 4,
        "n_output": 80,
        "block_length": 32,
        "n_unmasked": 40,
        "block": 1,
        "n_block_masked": 24,
        "confidence": CONFIDENCE,
    }
    return StepQuestion(**(values | changes))  # type: ignore[arg-type]


def test_the_features_are_the_papers_eleven() -> None:
    assert FEATURES == (
        "full_progress",
        "full_unmask_progress",
        "block_progress",
        "block_unmask_progress",
        "confidence_threshold",
        "output_min_confidence",
        "output_q25_confidence",
        "output_median_confidence",
        "output_avg_confidence",
        "output_q75_confidence",
        "output_length",
    )


def test_a_state_by_hand() -> None:
    (row,) = feature_matrix([question()], [0.7])
    expected = [5 / 80, 40 / 80, 1 / 3, 8 / 32, 0.7, 0.1, 0.2, 0.3, 0.35, 0.4, 80]
    assert row.tolist() == pytest.approx(expected)


def test_the_last_block_may_be_shorter() -> None:
    state = question(block=2, n_unmasked=72, n_block_masked=8)
    (row,) = feature_matrix([state], [0.9])
    assert row[FEATURES.index("block_unmask_progress")] == pytest.approx(0.5)


def test_rows_go_by_state_then_threshold() -> None:
    rows = feature_matrix([question(step=0), question(step=7)], [0.5, 0.9])
    assert rows[:, FEATURES.index("full_progress")].tolist() == [1 / 80, 1 / 80, 0.1, 0.1]
    assert rows[:, FEATURES.index("confidence_threshold")].tolist() == [0.5, 0.9, 0.5, 0.9]


@pytest.mark.parametrize(("n_states", "n_thresholds"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_asked_is_no_row(n_states: int, n_thresholds: int) -> None:
    rows = feature_matrix([question()] * n_states, [0.9] * n_thresholds)
    assert rows.shape == (0, len(FEATURES))


def test_nonsense_gives_numbers() -> None:
    rows = feature_matrix([question(n_output=0, block_length=0, block=2**40)], [0.9])
    assert np.isfinite(rows).all()


def test_the_state_after_a_block_is_in_the_next_one() -> None:
    run = run_of(3, lambda _: 0.9, n_output=80)
    ends = [n for n, step in enumerate(run) if step.n_block_masked == 0]
    assert [(state_after(run[n]).block, state_after(run[n]).n_block_masked) for n in ends] == [
        (1, 32),
        (2, 16),
        (2, 0),
    ]
    middle = state_after(run[0])
    assert (middle.block, middle.n_block_masked) == (0, run[0].n_block_masked)


def test_nothing_is_known_before_the_first_step() -> None:
    (row,) = feature_matrix([state_before(run_of(3, lambda _: 0.9, n_output=16))], [0.9])
    assert row.tolist() == [1 / 16, 0, 0, 0, 0.9, 0, 0, 0, 0, 0, 16]


def test_features_are_pure() -> None:
    script = (
        "import sys, dilaserve_predictor.features\n"
        "print(*sorted({'asyncio', 'torch', 'lightgbm', 'nats', 'redis'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
