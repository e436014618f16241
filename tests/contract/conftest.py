"""Connections and servers that are closed at the end of a test however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dilaserve.bus import Bus
from dilaserve.embedded import (
    EmbeddedServer,
    free_port,
    nats_answers,
    nats_argv,
    valkey_answers,
    valkey_argv,
)
from dilaserve.store.redis import RedisStore, connect_redis
from dilaserve.testing import Broker


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    connection = await broker.connect()
    yield connection
    await connection.close()


@pytest.fixture
async def other(broker: Broker) -> AsyncIterator[Bus]:
    connection = await broker.connect()
    yield connection
    await connection.close()


@pytest.fixture
async def loop_errors() -> AsyncIterator[list[BaseException]]:
    """Errors that reached the event loop's exception handler."""
    errors: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    yield errors
    loop.set_exception_handler(None)


@pytest.fixture
async def open_store() -> AsyncIterator[Callable[..., Awaitable[RedisStore]]]:
    """`connect_redis`, closing what it opened."""
    async with AsyncExitStack() as stack:

        async def connect(*args: object, **kwargs: object) -> RedisStore:
            store = await connect_redis(*args, **kwargs)
            stack.push_async_callback(store.close)
            return store

        yield connect


@pytest.fixture
async def make_server(tmp_path: Path) -> AsyncIterator[Callable[..., EmbeddedServer]]:
    """Servers that are not started yet, with options of one's own; stopped at the end."""
    async with AsyncExitStack() as stack:

        def make(name: str, *options: str) -> EmbeddedServer:
            port = free_port()
            nats = name == "nats"
            argv = nats_argv(port) if nats else valkey_argv(port, tmp_path)
            server = EmbeddedServer(
                name=name,
                url=f"{'nats' if nats else 'redis'}://127.0.0.1:{port}",
                port=port,
                argv=[*argv, *options],
                answers=nats_answers if nats else valkey_answers,
                log_path=tmp_path / f"{name}.log",
            )
            stack.push_async_callback(server.stop)
            return server

        yield make
