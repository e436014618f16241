"""Waiting in tests: for a condition, for the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dilaserve.bus import Bus


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Return once `condition` holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.005)


async def settled(bus: Bus) -> None:
    """Return once the broker has seen everything that this connection sent before."""
    done = asyncio.Event()
    subscription = await bus.subscribe("_INBOX.settled.here", lambda _: done.set())
    await bus.publish("_INBOX.settled.here", b"")
    await asyncio.wait_for(done.wait(), 5)
    await subscription.unsubscribe()
