"""Errors, the one-shot estimate, and how seldom a prediction may be refreshed."""

from __future__ import annotations

import numpy as np
import pytest

from dilaserve_predictor.evaluate import coarsest, granularity, one_shot, refreshed, wmape
from dilaserve_predictor.examples import examples_of

from .made_up import run_of


def test_the_error_is_pooled() -> None:
    assert wmape(np.array([3.0, 10.0]), np.array([1.0, 9.0])) == pytest.approx(0.3)
    assert np.isnan(wmape(np.array([]), np.array([])))


def test_one_shot_is_the_mean_at_arrival_less_the_steps_run() -> None:
    runs = [run_of(prompt, lambda _: 0.7, n_output=n) for prompt, n in ((1, 32), (2, 64))]
    training = examples_of(runs)
    per_token = (len(runs[0]) / 32 + len(runs[1]) / 64) / 2
    asked = examples_of([run_of(3, lambda _: 0.7, n_output=80)])
    expected = [max(80 * per_token - done, 1.0) for done in asked.step]
    assert one_shot(training, asked).tolist() == pytest.approx(expected)


def test_one_shot_of_a_threshold_never_seen_is_that_of_all() -> None:
    training = examples_of([run_of(1, lambda _: 0.7)])
    asked = examples_of([run_of(1, lambda _: 0.9)])
    assert one_shot(training, asked)[0] == len(run_of(1, lambda _: 0.7))


def test_refreshed_at_every_token_is_what_was_predicted() -> None:
    examples = examples_of([run_of(1, lambda _: 0.9), run_of(2, lambda _: 0.9)])
    predicted = examples.steps_left + 0.5
    assert refreshed(examples, predicted, 1).tolist() == predicted.tolist()


def test_between_two_predictions_it_shrinks_with_the_tokens_left() -> None:
    examples = examples_of([run_of(1, lambda _: 0.9)])
    predicted = np.full(len(examples), 30.0)
    known = refreshed(examples, predicted, 10**6)
    left = examples.n_output - examples.n_unmasked
    assert known.tolist() == pytest.approx(np.maximum(30.0 * left / left[0], 1.0).tolist())


def test_every_run_starts_with_a_prediction() -> None:
    examples = examples_of([run_of(1, lambda _: 0.9), run_of(2, lambda _: 0.9)])
    known = refreshed(examples, examples.steps_left, 10**6)
    starts = np.flatnonzero(examples.step == 0)
    assert known[starts].tolist() == examples.steps_left[starts].tolist()


def test_the_coarsest_within_five_percent_is_chosen() -> None:
    assert coarsest([(1, 0.2), (2, 0.205), (4, 0.21), (8, 0.211), (16, 0.2)]) == 4
    assert coarsest([(1, 0.2), (2, 0.3)]) == 1


def test_perfect_predictions_get_worse_when_they_are_seldom() -> None:
    examples = examples_of([run_of(prompt, lambda _: 0.9) for prompt in range(20)])
    curve = granularity(examples, examples.steps_left, (1, 64))
    assert curve[0] == (1, 0.0)
    assert curve[1][1] > 0.0
