"""Waiting for the store to come back, until that is given up. Knows not what is asked of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dilaserve.errors import StoreUnavailableError

__all__ = ["Patience"]

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

log = logging.getLogger(__name__)


class Patience:
    """For calls of one kind, as many as there are at a time."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self.has_ended = False
        """Whether nothing is waited for any more."""

    def end(self) -> None:
        """Wait no longer: neither between two calls, nor for the answer to one under way."""
        if self.has_ended:
            return
        self.has_ended = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def until_answered(self, call: Callable[[], Awaitable[T]], *, what: str) -> T | None:
        """Ask again and again, with growing pauses, until the store answers; None if patience
        ended before: the call may or may not have been carried out. `what` names it in the log."""
        if self.has_ended:
            return None
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                return await _again_and_again(call, what)
        except TimeoutError:
            if not wait.expired():
                raise  # the call's own
            return None
        finally:
            self._waits.discard(wait)


async def _again_and_again(call: Callable[[], Awaitable[T]], what: str) -> T:
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except StoreUnavailableError as error:
            log.warning("%s: the store does not answer (%s); trying again", what, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
