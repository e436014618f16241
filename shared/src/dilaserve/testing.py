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
