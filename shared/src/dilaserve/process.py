"""How a service's process ends. Knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from dilaserve.errors import BusUnavailableError

__all__ = ["run_while_open"]


async def run_while_open(serving: Coroutine[object, object, None], closed: asyncio.Event) -> None:
    """Run `serving` to its end. Raises BusUnavailableError, and cancels it, once `closed` is set:
    the bus will not come back, so the process must be started again."""
    running = asyncio.create_task(serving)
    closing = asyncio.create_task(closed.wait())
    try:
        await asyncio.wait([running, closing], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise BusUnavailableError("NATS closed the connection for good; see the log above")
        await running
    finally:
        running.cancel()
        closing.cancel()
