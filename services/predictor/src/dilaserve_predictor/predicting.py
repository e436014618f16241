"""Questions → answers: one evaluation of the trees for all that is asked together. Knows no bus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dilaserve.messages import PredictSteps, StepAnswer, StepsPredicted
from dilaserve_predictor.features import Floats, feature_matrix
from dilaserve_predictor.model import StepModel

__all__ = ["nothing_known", "predict"]


def predict(model: StepModel, queries: Sequence[PredictSteps]) -> list[StepsPredicted]:
    """The answer to each query; all must be about the model's own language model."""
    features = [feature_matrix(query.questions, query.thresholds) for query in queries]
    n_rows = [len(rows) for rows in features]
    if not sum(n_rows):
        return [_answer(query, np.empty(0), np.empty(0)) for query in queries]
    median, upper = model.predict(np.concatenate(features))
    ends = np.cumsum(n_rows)[:-1]
    parts = zip(queries, np.split(median, ends), np.split(upper, ends), strict=True)
    return [_answer(query, own_median, own_upper) for query, own_median, own_upper in parts]


def nothing_known(query: PredictSteps) -> StepsPredicted:
    """The answer of a predictor that cannot say anything: none of the requests is in it."""
    return StepsPredicted(model_id=query.model_id, thresholds=query.thresholds, answers=[])


def _answer(query: PredictSteps, median: Floats, upper: Floats) -> StepsPredicted:
    shape = len(query.questions), len(query.thresholds)
    medians, uppers = median.reshape(shape).tolist(), upper.reshape(shape).tolist()
    return StepsPredicted(
        model_id=query.model_id,
        thresholds=query.thresholds,
        answers=[
            StepAnswer(request_id=question.request_id, step=question.step, p50=p50, upper=above)
            for question, p50, above in zip(query.questions, medians, uppers, strict=True)
        ],
    )
