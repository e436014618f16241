"""Open-loop load: every request is sent at its own time, however the earlier ones fare.

Knows HTTP and a clock. Latencies count from the time at which a request was due, not from when it
was sent, so that a generator that falls behind hides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import httpx
import msgspec

from dilaserve_bench.twin.workload import Arrival, Workload

__all__ = ["Answer", "Body", "drive"]

TIMEOUT_S = 300.0

Body = Callable[[Arrival], dict[str, Any]]
"""What is posted for an arrival."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one request. Seconds from the start of the trace."""

    request_id: str
    due_at: float
    sent_at: float
    ended_at: float
    outcome: Literal["done", "refused", "failed"]
    text: str = ""
    """The answer, or the error."""

    @property
    def latency_s(self) -> float:
        """As the client sees it."""
        return self.ended_at - self.due_at


async def drive(url: str, workload: Workload, body: Body, *, path: str) -> list[Answer]:
    """Send a whole trace to a gateway, and wait for every answer; in order of arrival."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        start = time.perf_counter()
        return await _send_all(client, workload, body, path=path, start=start)


async def _send_all(
    client: httpx.AsyncClient, workload: Sequence[Arrival], body: Body, *, path: str, start: float
) -> list[Answer]:
    tasks: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        for arrival in workload:
            content = msgspec.json.encode(body(arrival))
            await asyncio.sleep(max(start + arrival.at_s - time.perf_counter(), 0.0))
            tasks.append(group.create_task(_send(client, arrival, content, path, start)))
    return [task.result() for task in tasks]


async def _send(
    client: httpx.AsyncClient, arrival: Arrival, content: bytes, path: str, start: float
) -> Answer:
    sent_at = time.perf_counter() - start
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    ended_at = time.perf_counter() - start
    outcome, text = _read(response)
    return Answer(
        request_id=arrival.request_id,
        due_at=arrival.at_s,
        sent_at=sent_at,
        ended_at=ended_at,
        outcome=outcome,
        text=text,
    )


def _read(response: httpx.Response) -> tuple[Literal["done", "refused", "failed"], str]:
    if response.status_code == httpx.codes.OK:
        return "done", str(response.json()["choices"][0]["text"])
    is_refused = response.status_code == httpx.codes.TOO_MANY_REQUESTS
    return ("refused" if is_refused else "failed"), response.text
