"""How commands reach the bus and the store of a stack: quietly, and where nothing answers with
the remedy for whoever typed the command. Knows no command."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from dilaserve.addresses import find_addresses, is_usual
from dilaserve.bus.nats import NatsBus, connect_nats
from dilaserve.errors import BusUnavailableError, StoreUnavailableError
from dilaserve.store.redis import RedisStore, connect_redis

__all__ = ["bus_of_stack", "store_of_stack"]

CONNECT_TIMEOUT_S = 2.0
NO_STACK = (
    "nothing answers at {url}, and no stack runs here; start one with `dilaserve up`, go to the "
    "folder where it was started (or set DILASERVE_HOME to its .dilaserve), or give {option}"
)


@asynccontextmanager
async def bus_of_stack(
    url: str | None, *, name: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncIterator[NatsBus]:
    """The bus at `url`, by default that of the stack here; closed with the context.
    Raises BusUnavailableError when it does not answer within `timeout_s`."""
    found = url or find_addresses(os.environ).nats_url
    try:
        with _without_warnings("dilaserve.bus.nats"):
            bus = await connect_nats(found, name=name, start_timeout_s=timeout_s)
    except BusUnavailableError as error:
        if url or not is_usual(os.environ, "nats_url"):
            raise
        raise BusUnavailableError(NO_STACK.format(url=found, option="--nats-url")) from error
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def store_of_stack(
    url: str | None, *, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncIterator[RedisStore]:
    """The store at `url`, by default that of the stack here; closed with the context.
    Raises StoreUnavailableError when it does not answer within `timeout_s`."""
    found = url or find_addresses(os.environ).redis_url
    try:
        with _without_warnings("dilaserve.store.server"):
            store = await connect_redis(found, start_timeout_s=timeout_s)
    except StoreUnavailableError as error:
        if url or not is_usual(os.environ, "redis_url"):
            raise
        raise StoreUnavailableError(NO_STACK.format(url=found, option="--redis-url")) from error
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Keeps a logger still: that a connection is being waited for is a service's news; a command
    ends with the error itself."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
