"""A stand-in for the step predictor where steps are recorded and there are no confidences: the
truth, wrong by as much as the published predictor is.

Half of an error's variance stays with a request, half is drawn anew for each answer; all
thresholds of an answer share it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from dilaserve.messages import PredictSteps, StepAnswer, StepQuestion, StepsPredicted
from dilaserve_bench.twin.recorded import StepTable

__all__ = ["PUBLISHED_WMAPE", "StandIn"]

PUBLISHED_WMAPE = 0.193
"""Of the predictor with all features (paper, Figure 6)."""
Z_80 = 0.8416
"""80 % quantile of the normal distribution."""
FOLDED = math.sqrt(2.0 / math.pi)
"""Mean of |z| for a normal z: turns a mean absolute error into a deviation."""


class StandIn:
    """See Adviser. `row_of` tells the row of a request by its id."""

    def __init__(
        self, table: StepTable, row_of: Callable[[str], int], *, wmape: float = PUBLISHED_WMAPE
    ) -> None:
        self._table = table
        self._row_of = row_of
        self._sigma = wmape / FOLDED

    def answer(self, now: float, query: object) -> StepsPredicted | None:
        """Of a PredictSteps; None for anything else."""
        if not isinstance(query, PredictSteps):
            return None
        return StepsPredicted(
            model_id=query.model_id,
            thresholds=query.thresholds,
            answers=[self._predict(q, query.thresholds) for q in query.questions],
        )

    def _predict(self, question: StepQuestion, thresholds: list[float]) -> StepAnswer:
        error = math.exp(self._sigma * self._deviation(question))
        p50 = [error * self._steps_left(question, threshold) for threshold in thresholds]
        above = math.exp(self._sigma * Z_80)
        return StepAnswer(
            request_id=question.request_id,
            step=question.step,
            p50=p50,
            upper=[steps * above for steps in p50],
        )

    def _deviation(self, question: StepQuestion) -> float:
        lasting = random.Random(question.request_id).gauss()
        passing = random.Random(f"{question.request_id}/{question.step}").gauss()
        return (lasting + passing) * math.sqrt(0.5)

    def _steps_left(self, question: StepQuestion, threshold: float) -> float:
        n_blocks = -(-question.n_output // question.block_length)
        row = self._row_of(question.request_id)
        steps = self._table.steps(row, threshold, question.n_output, n_blocks)
        return steps * (1.0 - question.n_unmasked / question.n_output)
