"""The predictor's stand-in is as wrong as the published one, and the same in every run; the trained
one answers as its service does; the estimate made once looks at nothing but the steps run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dilaserve.messages import PredictSteps, StepQuestion, StepsPredicted
from dilaserve_bench.twin.advice import (
    PUBLISHED_WMAPE,
    OneShot,
    StandIn,
    Trained,
    trained_in,
)
from dilaserve_bench.twin.recorded import NOT_RECORDED, StepTable

TABLE = StepTable(
    model="m",
    what="",
    source="",
    licence="",
    n_output=64,
    block_length=32,
    thresholds=[0.5, 0.9],
    rows=[[20, 40], [10, 30]],
)


def ask(
    stand_in: StandIn | OneShot | Trained, *request_ids: str, step: int = 5, n_unmasked: int = 16
) -> StepsPredicted:
    questions = [
        StepQuestion(
            request_id=request_id,
            step=step,
            n_output=64,
            block_length=32,
            n_unmasked=n_unmasked,
            block=0,
            n_block_masked=16,
            confidence=NOT_RECORDED,
        )
        for request_id in request_ids
    ]
    query = PredictSteps(model_id="m", thresholds=[0.5, 0.9], questions=questions)
    answer = stand_in.answer(0.0, query)
    assert answer is not None
    return answer


def test_without_error_it_tells_the_truth() -> None:
    stand_in = StandIn(TABLE, {"a": 0, "b": 1}.__getitem__, wmape=0.0)
    first, second = ask(stand_in, "a", "b").answers
    assert first.p50 == pytest.approx([15, 30])  # three quarters are left
    assert second.p50 == pytest.approx([7.5, 22.5])
    assert first.upper == first.p50


def test_it_is_as_wrong_as_the_published_predictor() -> None:
    stand_in = StandIn(TABLE, lambda _: 0)
    answers = ask(stand_in, *(f"r{n}" for n in range(4000))).answers
    errors = [abs(a.p50[1] - 30) / 30 for a in answers]
    assert sum(errors) / len(errors) == pytest.approx(PUBLISHED_WMAPE, abs=0.02)
    above = sum(a.upper[1] >= 30 for a in answers) / len(answers)
    assert above == pytest.approx(0.8, abs=0.03)


def test_the_same_question_gets_the_same_answer_and_another_step_another() -> None:
    first, second = (StandIn(TABLE, lambda _: 0) for _ in range(2))
    assert ask(first, "r") == ask(second, "r")
    assert ask(first, "r", step=6).answers[0].p50 != ask(first, "r").answers[0].p50


def test_errors_of_two_thresholds_are_alike_but_not_the_same() -> None:
    answers = ask(StandIn(TABLE, lambda _: 0), *(f"r{n}" for n in range(4000))).answers
    pairs = [(math.log(a.p50[0] / 15), math.log(a.p50[1] / 30)) for a in answers]
    shared = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    assert shared == pytest.approx(2 / 3, abs=0.05)


def test_other_questions_are_not_answered() -> None:
    assert StandIn(TABLE, lambda _: 0).answer(0.0, "how late is it?") is None


def test_one_shot_only_counts_down() -> None:
    adviser = OneShot({0.5: 0.25, 0.9: 0.5}, upper=1.5)
    (answer,) = ask(adviser, "r", step=5).answers
    assert answer.p50 == [16 - 5, 32 - 5]
    assert answer.upper == [24 - 5, 48 - 5]
    assert ask(adviser, "r", step=5, n_unmasked=63).answers[0].p50 == answer.p50
    assert ask(adviser, "r", step=40).answers[0].p50 == [1, 1]
    assert adviser.answer(0.0, "how late is it?") is None


def test_the_bundled_predictor_answers_and_says_how_often_to_ask() -> None:
    trained = trained_in(Path(__file__).parents[3] / "models" / "tiny")
    assert trained is not None
    answer = ask(trained, "a", "b")
    assert [each.request_id for each in answer.answers] == ["a", "b"]
    assert all(
        1 <= p50 <= upper for a in answer.answers for p50, upper in zip(a.p50, a.upper, strict=True)
    )
    assert answer.refresh_tokens is not None
    assert trained.answer(0.0, "how late is it?") is None


def test_a_model_without_a_predictor_has_none(tmp_path: Path) -> None:
    assert trained_in(tmp_path) is None
