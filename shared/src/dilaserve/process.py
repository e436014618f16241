"""How a service's process runs on, and how it ends. Knows no service."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine

from dilaserve.errors import BusUnavailableError

__all__ = ["collect_rarely", "run_while_open"]

N_YOUNG = 50_000
"""New objects after which cycles are looked for among them; Python's own 700 are a few steps'."""


def collect_rarely() -> None:
    """Look for cycles rarely from now on, and never among what is there already, which stays. A
    look at everything halts a process for as long as dozens of steps take to decide."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(N_YOUNG, *gc.get_threshold()[1:])


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
