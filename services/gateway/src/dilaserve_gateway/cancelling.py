"""Frees the slots of requests that nobody waits for: marks the record, tells the scheduler."""

from __future__ import annotations

import asyncio
import logging

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import StoreUnavailableError, UnavailableError
from dilaserve.messages import Cancel, encode
from dilaserve.store import Store

log = logging.getLogger(__name__)

STOPPED = "stop"
"""Reason for cancelling a request whose text has come to a stop string: it is answered."""
ATTEMPTS = 5
RETRY_DELAY_S = 0.5
REPLY_TIMEOUT_S = 1.0


async def cancel_request(bus: Bus, store: Store, request_id: str, reason: str) -> None:
    """Either of the two is enough: the next commit answers `terminal`, the scheduler releases."""
    await asyncio.gather(_mark(store, request_id, reason), _tell(bus, request_id))


async def _mark(store: Store, request_id: str, reason: str) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await store.cancel(request_id, reason=reason)
            return
        except StoreUnavailableError as error:
            log.warning("cancelling %s, attempt %d: %s", request_id, attempt, error)
            await asyncio.sleep(RETRY_DELAY_S)


async def _tell(bus: Bus, request_id: str) -> None:
    try:
        await bus.request(
            subjects.REQUEST_CANCEL,
            encode(Cancel(request_id=request_id)),
            timeout_s=REPLY_TIMEOUT_S,
        )
    except UnavailableError as error:
        log.info("the scheduler was not told that %s is cancelled: %s", request_id, error)
