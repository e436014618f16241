"""Waiting for the store to come back. Knows not what is asked of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dilaserve.errors import StoreUnavailableError

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

log = logging.getLogger(__name__)


async def until_answered(
    call: Callable[[], Awaitable[T]], *, what: str, give_up: asyncio.Event
) -> T | None:
    """Ask again and again, with growing pauses, until the store answers; None if `give_up` was
    set before. `what` names the call in the log."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except StoreUnavailableError as error:
            log.warning("%s: the store does not answer (%s); trying again", what, error)
        if await _set_within(give_up, pause_s):
            return None
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        # Not wait_for: it swallows a cancellation that comes together with the event.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
