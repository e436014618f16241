"""What a service's process says of itself, how it runs on, and how it ends. Knows no service."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass

from dilaserve.errors import BusUnavailableError

__all__ = ["Identity", "collect_rarely", "run_while_open"]

N_YOUNG = 50_000
"""New objects after which cycles are looked for among them; Python's own 700 are a few steps'."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, as its service card says it."""

    service_id: str
    pid: int
    host: str

    @classmethod
    def here(cls, service_id: str) -> Identity:
        """Of the process that asks."""
        return cls(service_id, os.getpid(), socket.gethostname())

    def card(self, address: str, **more: str) -> Mapping[str, str]:
        """Metadata of a ServiceCard. `address`: where it listens, empty without a listener."""
        own = {"id": self.service_id, "pid": str(self.pid), "address": address, "host": self.host}
        return own | more


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
