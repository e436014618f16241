"""Pytest fixtures for anything that needs a bus or a store; loaded by the root conftest.py.

One NATS and one Valkey server per test session; every test gets a Valkey database of its own, so
terms and leases of one test do not meet those of another. `bus` and `store` run a test twice:
in memory and on the real server.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from dilaserve.bus import Bus
from dilaserve.bus.memory import MemoryBus
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import EmbeddedServer, start_nats, start_valkey
from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve.store.redis import connect_redis
from dilaserve.testing.brokers import Broker, BrokerInMemory, BrokerOverNats

N_DATABASES = 10_000


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


@pytest.fixture(params=["memory", "nats"])
def bus_url(request: pytest.FixtureRequest) -> str:
    """URL of a NATS server; empty for a bus in memory."""
    return str(request.getfixturevalue("nats_url")) if request.param == "nats" else ""


@pytest_asyncio.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    """A connected bus, of either kind."""
    bus: Bus = await connect_nats(bus_url, name="test") if bus_url else MemoryBus()
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Valkey database; empty for a store in memory."""
    return str(request.getfixturevalue("redis_url")) if request.param == "redis" else ""


@pytest_asyncio.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An empty store, of either kind."""
    store: Store = await connect_redis(store_url) if store_url else MemoryStore()
    yield store
    await store.close()
