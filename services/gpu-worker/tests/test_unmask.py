from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilaserve_gpu_worker.engine.types import NotFiniteError
from dilaserve_gpu_worker.engine.unmask import choose, select

MASK_ID = 3


def choose_from(rows: list[list[float]]) -> tuple[list[int], list[float]]:
    tokens, confidences = choose(torch.tensor(rows), MASK_ID, len(rows))
    return tokens.tolist(), confidences.tolist()


def test_confidence_is_the_softmax_probability() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 4
    expected = logits.double().softmax(-1).max(-1)
    logits[:, MASK_ID] = -50
    tokens, confidences = choose(logits.clone(), MASK_ID, 40)
    is_other = expected.indices.numpy() != MASK_ID
    assert is_other.sum() > 30
    assert (tokens == expected.indices.numpy())[is_other].all()
    reference = logits.double().softmax(-1).max(-1).values
    np.testing.assert_allclose(confidences, reference.numpy(), rtol=3e-7)


def test_mask_token_is_banned_from_the_choice_and_stays_in_the_softmax() -> None:
    tokens, [confidence] = choose_from([[0.0, 1.0, 0.5, 4.0]])
    assert tokens == [1]
    assert confidence == pytest.approx(torch.tensor([0.0, 1.0, 0.5, 4.0]).softmax(-1)[1].item())


def test_equal_logits_go_to_the_lowest_token() -> None:
    for width in (5, 33, 500, 5000):
        row = [0.0] * width
        for token in range(width // 2, width):
            row[token] = 2.0
        tokens, _ = choose_from([row] * 33)
        assert set(tokens) == {width // 2 if width // 2 != MASK_ID else MASK_ID + 1}


def test_confidences_next_to_one_still_differ() -> None:
    _, (sure, surer) = choose_from([[20.0, 0.0, 0.0, 0.0], [25.0, 0.0, 0.0, 0.0]])
    assert sure < surer < 1


def test_padding_rows_are_left_out() -> None:
    tokens, confidences = choose(torch.zeros(32, 6), MASK_ID, 5)
    assert len(tokens) == len(confidences) == 5


def test_nan_fails_loudly() -> None:
    with pytest.raises(NotFiniteError, match="NaN"):
        choose_from([[0.0, float("nan"), 0.0, 0.0]])


def selected(confidences: list[float], threshold: float, quota: int | None = None) -> list[bool]:
    flags: list[bool] = select(np.array(confidences), threshold, quota).tolist()
    return flags


def test_strictly_above_the_threshold() -> None:
    assert selected([0.95, 0.9, 0.91], 0.9) == [True, False, True]


def test_else_the_single_most_confident_and_of_equals_the_lowest_position() -> None:
    assert selected([0.2, 0.5, 0.5, 0.1], 0.9) == [False, True, False, False]


def test_quota_takes_the_most_confident_whatever_the_threshold() -> None:
    assert selected([0.2, 0.5, 0.5, 0.1], 0.0, 2) == [False, True, True, False]
    assert selected([0.2, 0.5], 0.9, 8) == [True, True]


LEVELS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


@given(
    confidences=st.lists(LEVELS, min_size=1, max_size=9),
    threshold=LEVELS,
    quota=st.none() | st.integers(1, 3),
)
def test_selection_is_what_its_words_say(
    confidences: list[float], threshold: float, quota: int | None
) -> None:
    order = sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))
    above = [i for i in order if confidences[i] > threshold]
    chosen = order[:quota] if quota else above or order[:1]
    assert selected(confidences, threshold, quota) == [i in chosen for i in range(len(confidences))]
