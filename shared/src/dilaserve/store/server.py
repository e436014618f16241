"""Talking to Redis or Valkey: bounded retries, the function library, errors with a remedy.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dilaserve.cancellation import kept_cancellation
from dilaserve.errors import SettingsError, StoreUnavailableError
from dilaserve.store.encoding import Field
from dilaserve.store.wire import pack
from dilaserve.urls import without_secrets

logger = logging.getLogger(__name__)

LIBRARY = "dilaserve"
MAX_CONNECTIONS = 64
FUNCTION_CALL = "FCALL"

_RETRY_WAITS_S = (0.02, 0.1, 0.3)
_BY_CLASS: dict[type[exceptions.RedisError], str] = {
    exceptions.OutOfMemoryError: (
        "the store is full: raise maxmemory, or send less until requests have expired"
    ),
    exceptions.ReadOnlyError: "this is a replica: point DILASERVE_REDIS_URL at the primary",
    exceptions.ClusterDownError: "the cluster is incomplete: wait for the failover",
    exceptions.MovedError: (
        "requests are spread over several nodes of a cluster, which is not supported: "
        "use one primary with replicas"
    ),
    exceptions.TryAgainError: "slots are being moved: try again",
    exceptions.ConnectionError: "start it, or set DILASERVE_REDIS_URL",
    exceptions.TimeoutError: "see whether it hangs, or set DILASERVE_REDIS_URL",
}
_BY_CODE = {
    "MISCONF": "the store cannot write to its disk: free some space",
    "NOREPLICAS": "too few replicas follow: start them, or lower min-replicas-to-write",
    "BUSY": "another script runs: try again",
    "WRONGTYPE": (
        "a key of DiLaServe's holds something else, so another program writes here: give "
        "DILASERVE_REDIS_URL a database of its own, or delete the keys 'dlm:*'"
    ),
}

_NO_DATABASE = ("DB index", "SELECT is not allowed")

Command = Sequence[Field]


def function_call(name: str, keys: Sequence[str], arguments: Sequence[Field]) -> Command:
    """The command that calls a function of the library."""
    return [FUNCTION_CALL, name, len(keys), *keys, *arguments]


class RedisServer:
    """A pool of connections to one server; made by `open_server`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._shown = without_secrets(url)
        self._timeout_s = timeout_s
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=None,  # `_pipeline` has one for the whole round trip
                socket_connect_timeout=timeout_s,
                protocol=2,
                retry=Retry(NoBackoff(), 0),  # `_attempts` retries, and knows what may be repeated
            )
            pool.make_connection()  # type: ignore[no-untyped-call]  # knows the URL's options
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"DILASERVE_REDIS_URL={self._shown!r}: {error}; use for example redis://127.0.0.1:6379/0"
            ) from error
        self.client: Redis = Redis.from_pool(pool)

    async def command(self, command: Command, *, retry: bool = True) -> Any:
        """Carry out one command; see `commands`."""
        [answer] = await self.commands([command], retry=retry)
        return answer

    async def commands(self, commands: Sequence[Command], *, retry: bool = True) -> list[Any]:
        """As `answers`, but raises the first error once all have been carried out."""
        answers = await self.answers(commands, retry=retry)
        for answer in answers:
            if isinstance(answer, exceptions.ResponseError):
                raise self._explain(answer)
        return answers

    async def answers(self, commands: Sequence[Command], *, retry: bool = True) -> list[Any]:
        """Carry out commands in one round trip, each atomic by itself, and again after a lost
        connection unless `retry` forbids it. A key of the wrong type answers with its error.
        Raises StoreUnavailableError for trouble that may pass."""
        answers = await self._attempts(commands, retry=retry)
        lost = [i for i, answer in enumerate(answers) if _is_unknown_function(answer)]
        if lost:  # the server was restarted without its data
            await self.load_functions()
            again = await self._attempts([commands[i] for i in lost], retry=retry)
            for i, answer in zip(lost, again, strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, exceptions.ResponseError) and not _is_wrong_type(answer):
                raise self._explain(answer)
        return answers

    async def load_functions(self) -> None:
        """Load the function library unless the server has this very code."""
        code = resources.files(__package__).joinpath("functions.lua").read_text()
        listed = await self.command(["FUNCTION", "LIST", "LIBRARYNAME", LIBRARY, "WITHCODE"])
        if code.encode() in (value for library in listed for value in library):
            return
        await self.command(["FUNCTION", "LOAD", "REPLACE", code])
        logger.info("loaded the function library %s into %s", LIBRARY, self._shown)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        await self.client.connection_pool.disconnect()

    async def _attempts(self, commands: Sequence[Command], *, retry: bool) -> list[Any]:
        waits_s = list(_RETRY_WAITS_S) if retry else []
        while True:
            try:
                return await self._pipeline(commands)
            except exceptions.ConnectionError as error:
                if not waits_s or isinstance(error, exceptions.AuthenticationError):
                    raise self._explain(error) from error
                await asyncio.sleep(waits_s.pop(0))
            except exceptions.RedisError as error:
                raise self._explain(error) from error

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Answers and errors of one round trip, within the time-out."""
        with kept_cancellation():
            try:
                async with asyncio.timeout(self._timeout_s):
                    if all(command[0] == FUNCTION_CALL for command in commands):
                        return await self._calls(commands)
                    async with self.client.pipeline(transaction=False) as pipeline:
                        for command in commands:
                            pipeline.execute_command(*command)
                        return await pipeline.execute(raise_on_error=False)
            except TimeoutError as error:
                raise exceptions.TimeoutError(f"no answer within {self._timeout_s} s") from error

    async def _calls(self, commands: Sequence[Command]) -> list[Any]:
        """As the client's pipeline, for commands whose answers it leaves as they are: packed in
        one go, at less than half the cost."""
        pool = self.client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(pack(commands))
            return [await _answer(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)  # answers may be left on it
            raise
        finally:
            await pool.release(connection)

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
            return SettingsError(
                f"DILASERVE_REDIS_URL={self._shown!r}: {error}; "
                "use for example redis://user:password@127.0.0.1:6379/0"
            )
        if any(words in str(error) for words in _NO_DATABASE):
            return SettingsError(
                f"DILASERVE_REDIS_URL={self._shown!r}: {error}; "
                "use for example redis://127.0.0.1:6379/0"
            )
        remedy = _BY_CODE.get(str(error).split(" ")[0]) or next(
            (text for kind, text in _BY_CLASS.items() if isinstance(error, kind)), None
        )
        if remedy is None:
            return error
        return StoreUnavailableError(
            f"the store at {self._shown} does not serve ({error}); {remedy}"
        )


async def open_server(url: str, *, start_timeout_s: float, timeout_s: float) -> RedisServer:
    """Connect, waiting up to `start_timeout_s` for the server to come up, and load the functions.
    Raises StoreUnavailableError, SettingsError."""
    server = RedisServer(url, timeout_s=timeout_s)
    try:
        await _load_patiently(server, time.monotonic() + start_timeout_s)
    except BaseException:
        await server.close()
        raise
    return server


async def _load_patiently(server: RedisServer, deadline_s: float) -> None:
    announced = False
    while True:
        try:
            return await server.load_functions()
        except StoreUnavailableError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not announced:
                announced = True
                logger.warning("waiting for the store: %s", error)
            await asyncio.sleep(0.2)


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error


def _is_wrong_type(error: exceptions.ResponseError) -> bool:
    return str(error).startswith("WRONGTYPE")


def _is_unknown_function(answer: object) -> bool:
    return isinstance(answer, exceptions.ResponseError) and "unction not found" in str(answer)
