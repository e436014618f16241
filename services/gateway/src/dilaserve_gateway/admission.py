"""Has one request admitted: record, Submit, and trying again while a part is restarting.

Everything it sends is idempotent by request id, so a lost answer does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import UnavailableError
from dilaserve.messages import Admitted, Refused, Submit, decode_reply, encode
from dilaserve.store import Store
from dilaserve.store.records import NewRequest
from dilaserve_gateway.errors import ApiError, invalid, overloaded, unavailable

log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 2.0
"""A scheduler that took the request and died answers nothing."""
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 1.0
EXPIRE_S = 30.0
MEMORY_AGE_S = 0.5
"""How old the last look at the store's memory may be."""


class Admission:
    """Writes records and asks the scheduler. `clock` counts seconds from anywhere."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        *,
        clock: Callable[[], float],
        timeout_s: float,
        max_store_share: float,
    ) -> None:
        self._bus = bus
        self._store = store
        self._clock = clock
        self._timeout_s = timeout_s
        self._max_store_share = max_store_share
        self._looked_at: float | None = None

    async def check_store(self) -> None:
        """Raises ApiError 503 when the store is nearly full, since a full one stops every
        commit; UnavailableError when it does not answer."""
        if self._looked_at is not None and self._clock() - self._looked_at < MEMORY_AGE_S:
            return
        memory = await self._store.memory()
        if memory.limit and memory.used > self._max_store_share * memory.limit:
            share = 100 * memory.used / memory.limit
            raise unavailable(f"the store is {share:.0f} % full")
        self._looked_at = self._clock()

    async def admit(self, request: NewRequest, headers: Mapping[str, str]) -> None:
        """Return once the request is admitted. Raises ApiError: 400 never fits, 429 overloaded,
        503 nobody to serve it, or no answer within the time-out."""
        deadline = self._clock() + self._timeout_s
        delay_s = FIRST_DELAY_S
        while True:
            try:
                reply = await self._submit(request, headers, deadline)
            except (UnavailableError, msgspec.DecodeError) as error:
                reason = str(error)
            else:
                if isinstance(reply, Admitted) or _has_ended(reply):
                    return
                if reply.code != "unknown":  # that one: the store has lost the record, write again
                    raise _refusal(reply)
                reason = reply.reason
            if self._clock() + delay_s >= deadline:
                raise unavailable(f"not admitted within {self._timeout_s:.0f} s: {reason}")
            log.debug("request %s not admitted yet: %s", request.request_id, reason)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _submit(
        self, request: NewRequest, headers: Mapping[str, str], deadline: float
    ) -> Admitted | Refused:
        await self._store.new(request, expire_s=EXPIRE_S)
        answer = await self._bus.request(
            subjects.REQUEST_SUBMIT,
            encode(_message(request)),
            timeout_s=max(0.05, min(ATTEMPT_TIMEOUT_S, deadline - self._clock())),
            headers=headers,
        )
        reply = decode_reply(answer.data)
        if not isinstance(reply, (Admitted, Refused)):
            raise msgspec.ValidationError(f"a submit was answered by {type(reply).__name__}")
        return reply


def _message(request: NewRequest) -> Submit:
    return Submit(
        request_id=request.request_id,
        model_id=request.model_id,
        n_prompt=len(request.prompt),
        n_output=request.spec.n_output,
        block_length=request.spec.block_length,
        arrival_s=request.arrival_s,
        slo_ms=request.level.slo_ms,
        priority=request.level.priority,
        min_confidence=request.level.min_confidence,
    )


def _has_ended(reply: Refused) -> bool:
    """An earlier attempt was admitted, its answer lost, and the request is over already: its
    record says how."""
    return reply.code == "finished"


def _refusal(reply: Refused) -> ApiError:
    match reply.code:
        case "never_fits":
            return invalid(
                f"No instance can serve this request: {reply.reason}.",
                code="context_length_exceeded",
            )
        case "overloaded":
            return overloaded(reply.reason, reply.retry_after_s or 1.0)
        case _:
            return unavailable(reply.reason, reply.retry_after_s or 1.0)
