"""Asks the step predictor on behalf of the policy; nobody waits for the answer.

Without a predictor, or with a slow one, the policy goes on with what it knows. Knows no policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import BusUnavailableError
from dilaserve.messages import PredictSteps, decode_from_predictor, encode
from dilaserve_scheduler.core.events import Told

__all__ = ["PredictorCalls"]

TIMEOUT_S = 1.0

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
            self._answer(Told(decode_from_predictor(reply.data)))
        except BusUnavailableError as error:
            log.debug("no prediction: %s", error)
        except msgspec.DecodeError as error:
            log.warning("the step predictor answered nonsense: %s", error)
