"""Which requests to ask the step predictor about, and when (paper 3.2.3).

A request is due again after so many newly unmasked tokens, which the predictor may know best. One
question is under way at a time, so that a slow predictor gets larger batches, not a longer queue;
who waits for it is nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from dilaserve.messages import (
    NOTHING_COMPUTED,
    ConfidenceStats,
    PredictSteps,
    StepItemResult,
    StepQuestion,
    StepsPredicted,
)
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.policy import Inquire

__all__ = ["Asking"]

PATIENCE_S = 1.0
"""A question without an answer is given up after this."""
MAX_BATCH = 256
"""Requests in one question."""


class Asking:
    """For all models of a cluster. With `as_predicted`, the predictor of a model says after how
    many tokens to ask it, once it has answered; `every_tokens` holds until then."""

    def __init__(
        self, thresholds: Sequence[float], every_tokens: int, *, as_predicted: bool = False
    ) -> None:
        self._thresholds = list(thresholds)
        self._every = every_tokens
        self._as_predicted = as_predicted
        self._every_of: dict[str, int] = {}
        self._asked_at: dict[str, int] = {}
        self._due: dict[str, dict[str, tuple[Request, ConfidenceStats]]] = {}
        """By model, by request."""
        self._until: dict[str, float] = {}

    def arrived(self, request: Request) -> None:
        """A request has come, of which nothing is known but its length."""
        self._due_of(request)[request.request_id] = request, NOTHING_COMPUTED

    def stepped(self, request: Request, confidence: ConfidenceStats) -> None:
        """A step of the request left these confidences."""
        if self._is_due(request):
            self._due_of(request)[request.request_id] = request, confidence

    def passed(self, requests: Sequence[Request], items: Iterable[StepItemResult]) -> None:
        """The same of those of a pass whose requests go on."""
        due = {request.request_id: request for request in requests if self._is_due(request)}
        if due:
            for item in items:
                request = due.get(item.request_id)
                if request is not None:
                    self._due_of(request)[item.request_id] = request, item.confidence

    def n_unmasked(self, request_id: str) -> int:
        """Tokens unmasked when the request was asked about last."""
        return self._asked_at.get(request_id, 0)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._asked_at.pop(request.request_id, None)
        self._due_of(request).pop(request.request_id, None)

    def answered(self, answer: StepsPredicted) -> None:
        """The question about a model is answered."""
        self._until.pop(answer.model_id, None)
        if self._as_predicted and answer.refresh_tokens:
            self._every_of[answer.model_id] = answer.refresh_tokens

    def questions(self, now: float) -> list[Inquire]:
        """What to ask now; at most one question per model."""
        return [
            self._ask(now, model_id, batch)
            for model_id, due in self._due.items()
            if due and self._until.get(model_id, 0.0) <= now and (batch := self._take(due))
        ]

    def _take(self, due: dict[str, tuple[Request, ConfidenceStats]]) -> list[StepQuestion]:
        batch = []
        for request, confidence in list(islice(due.values(), MAX_BATCH)):
            del due[request.request_id]
            if confidence is NOTHING_COMPUTED and request.step:
                continue  # it has run meanwhile, and is due again soon
            batch.append(_question(request, confidence))
            self._asked_at[request.request_id] = request.n_unmasked
        return batch

    def _due_of(self, request: Request) -> dict[str, tuple[Request, ConfidenceStats]]:
        return self._due.setdefault(request.model_id, {})

    def _is_due(self, request: Request) -> bool:
        every = self._every_of.get(request.model_id, self._every)
        return request.n_unmasked - self._asked_at.get(request.request_id, 0) >= every

    def _ask(self, now: float, model_id: str, batch: list[StepQuestion]) -> Inquire:
        self._until[model_id] = now + PATIENCE_S
        query = PredictSteps(model_id=model_id, thresholds=self._thresholds, questions=batch)
        return Inquire(query)


def _question(request: Request, confidence: ConfidenceStats) -> StepQuestion:
    return StepQuestion(
        request_id=request.request_id,
        step=request.step,
        n_output=request.n_output,
        block_length=request.block_length,
        n_unmasked=request.n_unmasked,
        block=request.block,
        n_block_masked=request.n_block_masked,
        confidence=confidence,
    )
