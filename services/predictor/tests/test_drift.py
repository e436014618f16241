"""Predictions are held against steps that were really run at their threshold."""

from __future__ import annotations

import msgspec
import pytest

from dilaserve.messages import StepAnswer, StepItemResult, StepsPredicted
from dilaserve_predictor.drift import Comparison, Drift, Score

from .made_up import item_of, run_of

LOW, HIGH = 0.5, 0.9
STEP = item_of(run_of(1, lambda _: HIGH, run_id="r")[0])


def said(step: int, low: float, high: float, request_id: str = "r") -> StepsPredicted:
    return StepsPredicted(
        model_id="m",
        thresholds=[LOW, HIGH],
        answers=[
            StepAnswer(request_id=request_id, step=step, p50=[low, high], upper=[low + 2, high + 2])
        ],
    )


def ran(step: int, threshold: float = HIGH, *, is_last: bool = False) -> StepItemResult:
    return msgspec.structs.replace(
        STEP, step=step, threshold=threshold, finish_reason="length" if is_last else None
    )


def compare(*events: StepsPredicted | StepItemResult) -> list[Comparison]:
    drift = Drift()
    found: list[Comparison] = []
    for event in events:
        if isinstance(event, StepsPredicted):
            drift.answered(event)
        else:
            found += drift.stepped(event)
    return found


def test_at_the_end_the_truth_is_known() -> None:
    found = compare(ran(1), said(1, 5, 9), ran(2), said(2, 4, 7), ran(3), ran(4, is_last=True))
    assert found == [Comparison(9, 11, 3, "end"), Comparison(7, 9, 2, "end")]


def test_a_change_of_threshold_compares_with_what_was_said_last() -> None:
    found = compare(
        ran(1), said(1, 5, 9), ran(2), ran(3), said(3, 3, 6), ran(4, LOW), ran(5, LOW, is_last=True)
    )
    assert found == [
        Comparison(9, 11, 2 + 6, "change"),
        Comparison(3, 5, 2, "end"),
    ]


def test_what_was_said_before_the_first_step_is_not_held_against_it() -> None:
    found = compare(said(0, 5, 9), ran(1), said(1, 2, 4), ran(2), ran(3, is_last=True))
    assert found == [Comparison(4, 6, 2, "end")]


def test_the_step_after_the_prediction_may_be_the_first_at_its_threshold() -> None:
    found = compare(ran(1, LOW), said(1, 5, 9), ran(2, HIGH), ran(3, HIGH, is_last=True))
    assert found == [Comparison(9, 11, 2, "end")]


def test_a_prediction_alone_before_a_change_is_not_compared() -> None:
    found = compare(ran(1), said(1, 5, 9), ran(2), ran(3, LOW), ran(4, LOW, is_last=True))
    assert found == []


def test_an_answer_may_come_after_steps_that_were_run_meanwhile() -> None:
    found = compare(ran(1), ran(2), ran(3), said(1, 5, 9), ran(4, is_last=True))
    assert found == [Comparison(9, 11, 3, "end")]


def test_an_answer_from_before_a_change_comes_too_late() -> None:
    assert compare(ran(1), ran(2), ran(3, LOW), said(1, 5, 9), ran(4, LOW, is_last=True)) == []


def test_answers_may_come_in_any_order() -> None:
    found = compare(ran(1), ran(2), said(2, 4, 7), said(1, 5, 9), ran(3, LOW), ran(4, LOW))
    assert found == [Comparison(9, 11, 1 + 7, "change")]


def test_lost_results_end_the_comparison_of_what_was_said_before() -> None:
    found = compare(ran(1), said(1, 5, 9), ran(3), said(3, 3, 6), ran(4), ran(5, is_last=True))
    assert found == [Comparison(6, 8, 2, "end")]


def test_an_answer_ahead_of_all_results_is_compared_from_there_on() -> None:
    found = compare(said(4, 3, 6), ran(5), ran(6, is_last=True))
    assert found == [Comparison(6, 8, 2, "end")]


def test_a_threshold_that_was_not_asked_about_is_not_compared() -> None:
    assert compare(ran(1, 0.77), said(1, 5, 9), ran(2, 0.77), ran(3, 0.77, is_last=True)) == []


def test_repeated_results_and_those_of_zombies_count_once() -> None:
    fenced = msgspec.structs.replace(ran(2, LOW), outcome="fenced")
    found = compare(ran(1), said(1, 5, 9), ran(1), fenced, ran(2), ran(2), ran(3, is_last=True))
    assert found == [Comparison(9, 11, 2, "end")]


def test_whoever_has_ended_is_forgotten_and_so_is_whoever_is_silent_for_longest() -> None:
    drift = Drift(most_requests=2)
    drift.stepped(ran(1, is_last=True))
    assert len(drift) == 0
    for name in "abc":
        drift.answered(said(1, 5, 9, request_id=name))
    assert len(drift) == 2
    last = msgspec.structs.replace(ran(2, is_last=True), request_id="c")
    assert len(drift.stepped(last)) == 1


def test_the_score_is_of_the_last_comparisons() -> None:
    score = Score(window=2)
    assert (score.wmape, score.coverage) == (None, None)
    score.add([Comparison(100, 100, 1, "end")])
    score.add([Comparison(3, 4, 4, "end"), Comparison(8, 9, 10, "end")])
    assert len(score) == 2
    assert score.wmape == pytest.approx(3 / 14)
    assert score.coverage == 0.5
