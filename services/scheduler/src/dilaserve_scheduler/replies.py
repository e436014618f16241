"""Those who wait at the scheduler's endpoints for an answer. Knows no core: events go to `put`."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from dilaserve.bus import BusMessage
from dilaserve.messages import (
    Admitted,
    Cancel,
    Cancelled,
    Message,
    Refused,
    Submit,
    decode_request,
    encode,
)
from dilaserve_scheduler.observe import SchedulerMetrics

__all__ = ["Desk"]

RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Message)
_Answer = Admitted | Refused | Cancelled


class Desk:
    """Request handlers for Submit and Cancel, and what resolves them."""

    def __init__(
        self,
        submitted: Callable[[Submit, BusMessage], Submit],
        put: Callable[[Submit | Cancel], None],
        metrics: SchedulerMetrics,
        *,
        timeout_s: float,
    ) -> None:
        self._submitted = submitted
        self._put = put
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._submitters: dict[str, list[asyncio.Future[_Answer]]] = defaultdict(list)
        self._cancellers: dict[str, list[asyncio.Future[_Answer]]] = defaultdict(list)

    async def submit(self, message: BusMessage) -> bytes:
        """Admitted, or Refused."""
        submit = self._decode(message, Submit)
        if submit is None:
            return encode(_unavailable("", "this is no submission; see dilaserve.messages.Submit"))
        self._put(self._submitted(submit, message))
        answer = await self._wait(self._submitters, submit.request_id)
        return encode(answer or _unavailable(submit.request_id, "the store does not answer"))

    async def cancel(self, message: BusMessage) -> bytes:
        """Cancelled."""
        cancel = self._decode(message, Cancel)
        if cancel is None:
            return encode(Cancelled(request_id="", known=False))
        self._put(cancel)
        answer = await self._wait(self._cancellers, cancel.request_id)
        return encode(answer or Cancelled(request_id=cancel.request_id, known=False))

    def resolve(self, request_id: str, answer: _Answer) -> None:
        """Answer everybody who waits for this."""
        waiting = self._cancellers if isinstance(answer, Cancelled) else self._submitters
        for future in waiting.pop(request_id, []):
            if not future.done():
                future.set_result(answer)

    def _decode(self, message: BusMessage, kind: type[T]) -> T | None:
        try:
            request = decode_request(message.data)
        except msgspec.DecodeError as error:
            reason = str(error)
        else:
            if isinstance(request, kind):
                return request
            reason = f"{type(request).__name__} does not belong there"
        self._metrics.dropped("invalid")
        log.warning("dropped a message on %s: %s", message.subject, reason)
        return None

    async def _wait(
        self, waiting: dict[str, list[asyncio.Future[_Answer]]], request_id: str
    ) -> _Answer | None:
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        waiting[request_id].append(future)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            left = [other for other in waiting.pop(request_id, []) if other is not future]
            if left:
                waiting[request_id] = left


def _unavailable(request_id: str, reason: str) -> Refused:
    return Refused(
        request_id=request_id,
        reason=f"{reason}; try again",
        code="unavailable",
        retry_after_s=RETRY_AFTER_S,
    )
