"""Server-sent events, and the response that streams them and notices a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


class ClientDisconnectedError(Exception):
    """The client has closed its connection before the answer."""


def event(data: Mapping[str, Any], event_id: str = "") -> bytes:
    """One event with JSON data, which has no line breaks."""
    head = b"id: " + event_id.encode() + b"\n" if event_id else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends `events` until they end or the client leaves; calls `close` in any case, even when
    nothing was ever sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(status_code=200)
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except (ClientDisconnectedError, OSError):
            pass  # nobody is left to be told; `close` frees what was held
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, whose request body has been read; cancels it and raises
    ClientDisconnectedError when the client leaves first."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
