"""Who answers the policies' questions in the twin: the trained step predictor, where a real model
takes the steps; an estimate made once at arrival, to compare; and, where steps are recorded and
there are no confidences, a stand-in: the truth, wrong by as much as the published predictor is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist

from dilaserve.messages import PredictSteps, StepAnswer, StepQuestion, StepsPredicted
from dilaserve_bench.twin.recorded import StepTable
from dilaserve_predictor.model import FEWEST_STEPS, Predictor, StepModel
from dilaserve_predictor.predicting import predict
from dilaserve_predictor.settings import FOLDER_NAME

__all__ = ["PUBLISHED_WMAPE", "OneShot", "StandIn", "Trained", "trained_in"]

PUBLISHED_WMAPE = 0.193
"""Of the predictor with all features (paper, Figure 6)."""
Z_80 = 0.8416
"""80 % quantile of the normal distribution."""
THIRD = NormalDist(sigma=math.sqrt(1.0 / 3.0))
FOLDED = math.sqrt(2.0 / math.pi)
"""Mean of |z| for a normal z: turns a mean absolute error into a deviation."""


class Trained:
    """See Adviser: the production predictor."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def answer(self, now: float, query: object) -> StepsPredicted | None:
        """Of a PredictSteps, whatever its model; None for anything else."""
        return predict(self._predictor, [query])[0] if isinstance(query, PredictSteps) else None


def trained_in(model: Path) -> Trained | None:
    """The predictor that lies in a model's folder, where the service looks for it, if one does.
    Raises PredictorError for one that cannot be used."""
    folder = model / FOLDER_NAME
    return Trained(Predictor(StepModel.load(folder))) if folder.is_dir() else None


class OneShot:
    """See Adviser: mean steps per output token by threshold, times the output length, less the
    steps run. What happens to a request on its way changes nothing."""

    def __init__(self, steps_per_token: Mapping[float, float], *, upper: float) -> None:
        """`upper`: the upper quantile as a multiple of the estimate."""
        self._steps_per_token = steps_per_token
        self._upper = upper

    def answer(self, now: float, query: object) -> StepsPredicted | None:
        """Of a PredictSteps about thresholds that are known; None for anything else."""
        if not isinstance(query, PredictSteps):
            return None
        answers = [self._estimate(question, query.thresholds) for question in query.questions]
        return StepsPredicted(model_id=query.model_id, thresholds=query.thresholds, answers=answers)

    def _estimate(self, question: StepQuestion, thresholds: list[float]) -> StepAnswer:
        whole = [self._steps_per_token[each] * question.n_output for each in thresholds]
        return StepAnswer(
            request_id=question.request_id,
            step=question.step,
            p50=[max(steps - question.step, FEWEST_STEPS) for steps in whole],
            upper=[max(self._upper * steps - question.step, FEWEST_STEPS) for steps in whole],
        )


class StandIn:
    """See Adviser. `row_of` tells the row of a request by its id.

    A third of an error's variance stays with a request, a third with a request at one threshold,
    and a third is drawn anew for each answer.
    """

    def __init__(
        self, table: StepTable, row_of: Callable[[str], int], *, wmape: float = PUBLISHED_WMAPE
    ) -> None:
        self._table = table
        self._row_of = row_of
        self._sigma = wmape / FOLDED
        self._above = math.exp(self._sigma * Z_80)
        self._whole: dict[tuple[str, tuple[float, ...]], list[float]] = {}

    def answer(self, now: float, query: object) -> StepsPredicted | None:
        """Of a PredictSteps; None for anything else."""
        if not isinstance(query, PredictSteps):
            return None
        thresholds = tuple(query.thresholds)
        return StepsPredicted(
            model_id=query.model_id,
            thresholds=query.thresholds,
            answers=[self._predict(question, thresholds) for question in query.questions],
        )

    def _predict(self, question: StepQuestion, thresholds: tuple[float, ...]) -> StepAnswer:
        error = self._sigma * _normal(f"{question.request_id}/{question.step}")
        share = math.exp(error) * (1.0 - question.n_unmasked / question.n_output)
        p50 = [steps * share for steps in self._whole_request(question, thresholds)]
        above = self._above
        return StepAnswer(
            request_id=question.request_id,
            step=question.step,
            p50=p50,
            upper=[steps * above for steps in p50],
        )

    def _whole_request(self, question: StepQuestion, thresholds: tuple[float, ...]) -> list[float]:
        """Steps from its first to its last at each threshold, with the errors that last; kept,
        since whoever asks once asks again."""
        key = question.request_id, thresholds
        steps = self._whole.get(key)
        if steps is None:
            steps = self._whole[key] = [self._steps(question, each) for each in thresholds]
        return steps

    def _steps(self, question: StepQuestion, threshold: float) -> float:
        request_id = question.request_id
        n_blocks = -(-question.n_output // question.block_length)
        steps = self._table.steps(self._row_of(request_id), threshold, question.n_output, n_blocks)
        error = _normal(request_id) + _normal(f"{request_id} {threshold}")
        return steps * math.exp(self._sigma * error)


def _normal(name: str) -> float:
    """A normal deviate of variance 1/3 that belongs to a name. (A generator seeded with the name
    would do, and take eight times as long.)"""
    drawn = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")
    return THIRD.inv_cdf((drawn + 0.5) / 2**48)
