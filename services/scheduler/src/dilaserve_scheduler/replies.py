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
from dilaserve.plan_messages import Drain, Drained, NotDrained, decode_drain
from dilaserve_scheduler.observe import SchedulerMetrics

__all__ = ["Desk"]

RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Message)
_Answer = Admitted | Refused | Cancelled | Drained | NotDrained
_Waiting = dict[str, list[asyncio.Future[_Answer]]]


class Desk:
    """Request handlers for Submit, Cancel and Drain, and what resolves them."""

    def __init__(
        self,
        submitted: Callable[[Submit, BusMessage], Submit],
        put: Callable[[Submit | Cancel | Drain], None],
        metrics: SchedulerMetrics,
        *,
        timeout_s: float,
    ) -> None:
        self._submitted = submitted
        self._put = put
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._submitters: _Waiting = defaultdict(list)
        self._cancellers: _Waiting = defaultdict(list)
        self._drainers: _Waiting = defaultdict(list)

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

    async def drain(self, message: BusMessage) -> bytes:
        """Drained, or NotDrained."""
        try:
            drain = decode_drain(message.data)
        except msgspec.DecodeError as error:
            self._drop(message, str(error))
            reason = f"{error}; see dilaserve.plan_messages.Drain"
            return encode(NotDrained(instance_id="", reason=reason))
        self._put(drain)
        answer = await self._wait(self._drainers, drain.instance_id)
        reason = "the scheduler does not get to it; try again"
        return encode(answer or NotDrained(instance_id=drain.instance_id, reason=reason))

    def resolve(self, request_id: str, answer: Admitted | Refused | Cancelled) -> None:
        """Answer everybody who waits for this."""
        waiting = self._cancellers if isinstance(answer, Cancelled) else self._submitters
        _resolve(waiting, request_id, answer)

    def resolve_drain(self, answer: Drained | NotDrained) -> None:
        """The same for a Drain."""
        _resolve(self._drainers, answer.instance_id, answer)

    def _decode(self, message: BusMessage, kind: type[T]) -> T | None:
        try:
            request = decode_request(message.data)
        except msgspec.DecodeError as error:
            reason = str(error)
        else:
            if isinstance(request, kind):
                return request
            reason = f"{type(request).__name__} does not belong there"
        self._drop(message, reason)
        return None

    def _drop(self, message: BusMessage, reason: str) -> None:
        self._metrics.dropped("invalid")
        log.warning("dropped a message on %s: %s", message.subject, reason)

    async def _wait(self, waiting: _Waiting, request_id: str) -> _Answer | None:
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


def _resolve(waiting: _Waiting, key: str, answer: _Answer) -> None:
    for future in waiting.pop(key, []):
        if not future.done():
            future.set_result(answer)


def _unavailable(request_id: str, reason: str) -> Refused:
    return Refused(
        request_id=request_id,
        reason=f"{reason}; try again",
        code="unavailable",
        retry_after_s=RETRY_AFTER_S,
    )
