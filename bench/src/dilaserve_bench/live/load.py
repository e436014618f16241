"""Open-loop load: every request is sent at its own time, however the earlier ones fare.

Knows HTTP and a clock. Latencies count from the time at which a request was due, not from when it
was sent, so that a generator that falls behind hides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import httpx
import msgspec

from dilaserve_bench.twin.workload import Arrival, Workload

__all__ = ["Answer", "Body", "Level", "drive"]

TIMEOUT_S = 300.0
EVENT_STREAM = "text/event-stream"

Body = Callable[[Arrival], dict[str, Any]]
"""What is posted for an arrival; with `stream`, the answer is read as it comes."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway says of an answer (`dilaserve`), as far as it counts here."""

    mean_threshold: float | None = None
    slo_met: bool | None = None
    n_steps: int = 0
    migrations: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one request. Seconds from the start of the trace."""

    request_id: str
    due_at: float
    sent_at: float
    ended_at: float
    outcome: Literal["done", "refused", "failed"]
    text: str = ""
    """The answer, or the error."""
    first_at: float | None = None
    """When the first text of a stream came."""
    n_tokens: int = 0
    """Of the answer, as the gateway counts them."""
    level: Level | None = None

    @property
    def latency_s(self) -> float:
        """As the client sees it."""
        return self.ended_at - self.due_at


async def drive(
    url: str,
    workload: Workload,
    body: Body,
    *,
    path: str,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Send a whole trace to a gateway, and wait for every answer; in order of arrival."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        start = time.perf_counter()
        tasks: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as group:
            for arrival in workload:
                content = msgspec.json.encode(body(arrival))
                await asyncio.sleep(max(start + arrival.at_s - time.perf_counter(), 0.0))
                task = group.create_task(_send(client, arrival, content, path, start))
                task.add_done_callback(lambda task: _tell(task, on_answer))
                tasks.append(task)
    return [task.result() for task in tasks]


def _tell(task: asyncio.Task[Answer], on_answer: Callable[[Answer], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        on_answer(task.result())


async def _send(
    client: httpx.AsyncClient, arrival: Arrival, content: bytes, path: str, start: float
) -> Answer:
    reading = _Reading(lambda: time.perf_counter() - start)
    sent_at = time.perf_counter() - start
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", path, content=content, headers=headers) as response:
            await reading.read(response)
    except httpx.TransportError as error:
        reading.outcome, reading.texts = "failed", [str(error) or type(error).__name__]
    return Answer(
        request_id=arrival.request_id,
        due_at=arrival.at_s,
        sent_at=sent_at,
        ended_at=time.perf_counter() - start,
        outcome=reading.outcome,
        text="".join(reading.texts),
        first_at=reading.first_at,
        n_tokens=reading.n_tokens,
        level=reading.level,
    )


class _Reading:
    """An answer as it comes in."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.outcome: Literal["done", "refused", "failed"] = "failed"
        self.texts: list[str] = []
        self.first_at: float | None = None
        self.n_tokens = 0
        self.level: Level | None = None

    async def read(self, response: httpx.Response) -> None:
        """To its end."""
        if response.status_code != httpx.codes.OK:
            is_refused = response.status_code == httpx.codes.TOO_MANY_REQUESTS
            self.outcome = "refused" if is_refused else "failed"
            self.texts = [(await response.aread()).decode(errors="replace")]
        elif response.headers.get("content-type", "").startswith(EVENT_STREAM):
            async for line in response.aiter_lines():
                self._read_line(line)
        else:
            self._read_object(msgspec.json.decode(await response.aread()))
            self.outcome = "done"

    def _read_line(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name != "data":
            return
        if value.strip() == "[DONE]":
            self.outcome = "done"
            return
        event = msgspec.json.decode(value)
        if "error" in event:
            raise httpx.RemoteProtocolError(str(event["error"]["message"]))
        self._read_object(event)
        if self.texts and self.first_at is None:
            self.first_at = self._now()

    def _read_object(self, found: dict[str, Any]) -> None:
        self.texts += [text for choice in found.get("choices", []) if (text := _text_of(choice))]
        if usage := found.get("usage"):
            self.n_tokens = usage["completion_tokens"]
        if level := found.get("dilaserve"):
            self.level = msgspec.convert(level, Level)


def _text_of(choice: dict[str, Any]) -> str | None:
    """Of a completion or a chat, whole or a piece of it."""
    message: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
    text: str | None = choice.get("text") or message.get("content")
    return text
