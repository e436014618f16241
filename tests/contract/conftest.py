"""Two connections to a broker that may be stopped, and the errors that handlers raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dilaserve.bus import Bus
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
