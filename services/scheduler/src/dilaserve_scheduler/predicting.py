"""Asks the step predictor on behalf of the policy; nobody waits for the answer.

Without a predictor, or with a slow one, or with one that answers nonsense, the policy goes on with
what it knows. Knows no policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import BusUnavailableError
from dilaserve.messages import (
    PredictSteps,
    StepAnswer,
    StepQuestion,
    StepsPredicted,
    decode_from_predictor,
    encode,
)
from dilaserve_scheduler.core.events import Told

__all__ = ["PredictorCalls"]

TIMEOUT_S = 1.0
SELDOMEST_TOKENS = 64
"""A predictor may ask for questions at least this often: one that wanted none would never be heard
again."""

log = logging.getLogger(__name__)


class PredictorCalls:
    """Starts calls as tasks of `tasks`, and hands every answer to `answer`."""

    def __init__(
        self, bus: Bus, tasks: asyncio.TaskGroup, *, answer: Callable[[Told], None]
    ) -> None:
        self._bus = bus
        self._tasks = tasks
        self._answer = answer

    def start(self, query: object) -> None:
        """Ask in the background."""
        if isinstance(query, PredictSteps):
            self._tasks.create_task(self._ask(query))
        else:
            log.debug("nobody to answer %r", query)

    async def _ask(self, query: PredictSteps) -> None:
        try:
            reply = await self._bus.request(
                subjects.PREDICT_STEPS, encode(query), timeout_s=TIMEOUT_S
            )
            self._answer(Told(_checked(query, decode_from_predictor(reply.data))))
        except BusUnavailableError as error:
            log.debug("no prediction: %s", error)
        except msgspec.DecodeError as error:
            log.warning("the step predictor answered nonsense: %s", error)


def _checked(query: PredictSteps, answer: StepsPredicted) -> StepsPredicted:
    """What may be believed of an answer. Raises DecodeError for one to another question."""
    if answer.model_id != query.model_id or answer.thresholds != query.thresholds:
        raise msgspec.DecodeError(
            f"it speaks of {answer.model_id!r} at {answer.thresholds}, asked was "
            f"{query.model_id!r} at {query.thresholds}"
        )
    asked = {question.request_id: question for question in query.questions}
    answers = [
        _bounded(each, asked[each.request_id], len(query.thresholds))
        for each in answer.answers
        if each.request_id in asked
    ]
    refresh_tokens = answer.refresh_tokens and min(answer.refresh_tokens, SELDOMEST_TOKENS)
    return msgspec.structs.replace(answer, answers=answers, refresh_tokens=refresh_tokens)


def _bounded(answer: StepAnswer, question: StepQuestion, n_thresholds: int) -> StepAnswer:
    """Every step unmasks a token at least, so that more steps than masks are nonsense."""
    if not len(answer.p50) == len(answer.upper) == n_thresholds or answer.step != question.step:
        raise msgspec.DecodeError(
            f"{len(answer.p50)} and {len(answer.upper)} steps for {n_thresholds} thresholds as of "
            f"step {answer.step}, asked was as of step {question.step}"
        )
    most = float(max(question.n_output - question.n_unmasked, 1))
    return msgspec.structs.replace(
        answer,
        p50=[min(max(steps, 1.0), most) for steps in answer.p50],
        upper=[min(max(steps, 1.0), most) for steps in answer.upper],
    )
