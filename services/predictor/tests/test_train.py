"""Training: what it finds, what it says of it, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from dilaserve.messages import ConfidenceStats
from dilaserve_predictor.model import Predictor, PredictorError, StepModel
from dilaserve_predictor.train import n_fits, train

from .made_up import THRESHOLDS, question_of, run_of, runs_of


def test_confidences_tell_what_progress_does_not(trained: StepModel) -> None:
    errors = trained.info.errors
    assert errors["full"].wmape < 0.6 * errors["progress"].wmape
    assert errors["full"].wmape < 0.35 * errors["one_shot"].wmape


def test_a_new_prompt_is_predicted(predictor: Predictor) -> None:
    for prompt in range(1000, 1005):
        for threshold in THRESHOLDS:
            run = run_of(prompt, lambda _, t=threshold: t)
            median, upper = predictor.predict([question_of(run, 2)], [threshold])
            assert median[0, 0] == pytest.approx(len(run) - 2, rel=0.5, abs=2)
            assert upper[0, 0] >= median[0, 0]


def test_the_question_is_about_the_candidate_not_the_history(predictor: Predictor) -> None:
    run = run_of(1001, lambda step: 0.9 if step <= 3 else 0.5)
    ((median, at_the_old),) = predictor.predict([question_of(run, 3)], [0.5, 0.9])[0]
    assert abs(median - (len(run) - 3)) < abs(at_the_old - (len(run) - 3))


def test_whoever_asks_has_a_step_to_run(predictor: Predictor) -> None:
    state = question_of(run_of(5, lambda _: 0.5), 1)
    sure = ConfidenceStats(min=1, q25=1, median=1, mean=1, q75=1)
    nearly_done = msgspec.structs.replace(
        state, n_unmasked=63, n_block_masked=1, block=1, confidence=sure
    )
    median, upper = predictor.predict([nearly_done], [0.5, 0.9])
    assert (median >= 1.0).all()
    assert (upper >= median).all()


def test_the_model_says_how_it_was_made(trained: StepModel) -> None:
    info = trained.info
    assert (info.model_id, info.n_prompts) == ("made-up", 60)
    assert (info.n_runs, info.n_switching_runs) == (240, 60)
    assert info.thresholds == list(THRESHOLDS)
    assert 0.65 < info.upper_coverage < 0.95
    assert info.granularity[0][0] == 1
    assert info.refresh_tokens in [n for n, _ in info.granularity]


def test_training_repeats_itself() -> None:
    runs = runs_of(12)
    assert train(runs) == train(runs)


def test_every_fit_is_told() -> None:
    told: list[None] = []
    train(runs_of(10), told=lambda: told.append(None))
    assert len(told) == n_fits()


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(PredictorError, match=r"runs of 3 prompts .* record at least 10"):
        train(runs_of(3))


def test_runs_of_two_models_are_refused() -> None:
    runs = runs_of(12)
    runs[0] = [msgspec.structs.replace(step, model_id="other") for step in runs[0]]
    with pytest.raises(PredictorError, match="steps of made-up, other"):
        train(runs)


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(PredictorError, match="let `dilaserve record` finish"):
        train([run_of(1, lambda _: 0.9)[:-1]])


def test_runs_of_one_step_are_refused() -> None:
    runs = [run_of(prompt, lambda _: 0.9, n_output=1) for prompt in range(12)]
    with pytest.raises(PredictorError, match="none of these runs has a second step"):
        train(runs)
