"""Brokers that tests can take away and bring back, in memory and over NATS."""

from __future__ import annotations

from typing import Protocol

from dilaserve.bus import Bus
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import EmbeddedServer


class Broker(Protocol):
    """Something to connect buses to, that can go away and come back."""

    async def connect(self) -> Bus:
        """A new connection; close it."""
        ...

    async def stop(self) -> None:
        """Go away at once, as in a crash."""
        ...

    async def start(self) -> None:
        """Come back."""
        ...


class BrokerInMemory:
    """A Broker in this process."""

    def __init__(self) -> None:
        self._broker = MemoryBroker()

    async def connect(self) -> Bus:
        """See Broker."""
        return MemoryBus(self._broker)

    async def stop(self) -> None:
        """See Broker."""
        self._broker.up = False

    async def start(self) -> None:
        """See Broker."""
        self._broker.up = True


class BrokerOverNats:
    """A Broker that is a NATS server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    async def connect(self) -> Bus:
        """See Broker."""
        return await connect_nats(self._server.url, name="test")

    async def stop(self) -> None:
        """See Broker."""
        await self._server.kill()

    async def start(self) -> None:
        """See Broker."""
        await self._server.start()
