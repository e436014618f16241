"""Pytest fixtures for anything that needs a bus or a store; loaded by the root conftest.py.

One NATS and one Valkey server per test session; every test gets a Valkey database of its own, so
terms and leases of one test do not meet those of another. `bus` and `store` run a test twice:
in memory and on the real server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import pytest
import pytest_asyncio

from dilaserve.bus import Bus
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import EmbeddedServer, start_nats, start_valkey
from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve.store.redis import connect_redis

N_DATABASES = 10_000


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_server() -> AsyncIterator[EmbeddedServer]:
    """The session's NATS server. Leave it running."""
    async with start_nats() as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_server() -> AsyncIterator[EmbeddedServer]:
    """The session's Valkey server. Leave it running."""
    async with start_valkey(n_databases=N_DATABASES) as server:
        yield server


@pytest.fixture(scope="session")
def database_numbers() -> Iterator[int]:
    """Numbers of databases that nobody used yet."""
    return itertools.count(1)


@pytest.fixture
def nats_url(nats_server: EmbeddedServer) -> str:
    """URL of a NATS server; close what you connect, so that the next test does not hear it."""
    return nats_server.url


@pytest.fixture
def redis_url(valkey_server: EmbeddedServer, database_numbers: Iterator[int]) -> str:
    """URL of an empty Valkey database."""
    return f"{valkey_server.url.rpartition('/')[0]}/{next(database_numbers)}"


@pytest_asyncio.fixture(params=["memory", "nats"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """A broker of either kind, for this test alone: it may be stopped."""
    if request.param == "memory":
        yield BrokerInMemory()
        return
    async with start_nats() as server:
        yield BrokerOverNats(server)


@pytest_asyncio.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """A connected bus, of either kind."""
    if request.param == "memory":
        bus: Bus = MemoryBus()
    else:
        bus = await connect_nats(request.getfixturevalue("nats_url"), name="test")
    yield bus
    await bus.close()


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store, of either kind."""
    if request.param == "memory":
        store: Store = MemoryStore()
    else:
        store = await connect_redis(request.getfixturevalue("redis_url"))
    yield store
    await store.close()
