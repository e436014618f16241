"""Questions → answers: what is asked together is evaluated together. Knows no bus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from dilaserve.messages import PredictSteps, StepAnswer, StepsPredicted
from dilaserve_predictor.model import Predictor

__all__ = ["nothing_known", "predict"]


def predict(predictor: Predictor, queries: Sequence[PredictSteps]) -> list[StepsPredicted]:
    """The answer to each query; all must be about the predictor's language model. Neighbours that
    ask about the same thresholds, as a cluster's schedulers do, are one evaluation."""
    return [
        answer
        for _, group in groupby(queries, key=lambda query: query.thresholds)
        for answer in _predict_group(predictor, list(group))
    ]


def nothing_known(query: PredictSteps) -> StepsPredicted:
    """The answer of a predictor that cannot say anything: none of the requests is in it."""
    return StepsPredicted(model_id=query.model_id, thresholds=query.thresholds, answers=[])


def _predict_group(
    predictor: Predictor, queries: Sequence[PredictSteps]
) -> Iterator[StepsPredicted]:
    states = [state for query in queries for state in query.questions]
    thresholds = queries[0].thresholds
    median, upper = (each.tolist() for each in predictor.predict(states, thresholds))
    start = 0
    for query in queries:
        end = start + len(query.questions)
        answers = [
            StepAnswer(request_id=state.request_id, step=state.step, p50=p50, upper=above)
            for state, p50, above in zip(
                query.questions, median[start:end], upper[start:end], strict=True
            )
        ]
        yield StepsPredicted(
            model_id=query.model_id,
            thresholds=thresholds,
            answers=answers,
            refresh_tokens=predictor.info.refresh_tokens,
        )
        start = end
