"""Twenty concurrent streams whose texts are known, and the replay of each from its record."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import torch

from dilaserve.store import Store
from dilaserve.store.records import Delta, RequestRecord
from dilaserve.store.redis import connect_redis
from dilaserve.supervisor.stack import Stack
from dilaserve_bench.tiny.tasks import LONG_CHAINS, held_out_problem
from dilaserve_gpu_worker.engine.alone import engine_for_one
from dilaserve_gpu_worker.replay import RecordedStep, ReplayReport, reproduce
from dilaserve_gpu_worker.weights import load_model

MODEL = Path(__file__).parents[2] / "models/tiny"
N_STREAMS = 20
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a client received of one stream."""

    request_id: str
    text: str
    finish_reason: str
    n_tokens: int


def bodies() -> list[dict[str, object]]:
    """Chains of one, two and three blocks, every third sampled at temperature 1; all with a seed,
    so that a fixed threshold leaves their texts nothing to depend on."""
    return [_body(i) for i in range(N_STREAMS)]


def _body(index: int) -> dict[str, object]:
    length = 32 * (3 - index % 3)
    problem = held_out_problem("total" if index % 4 < 2 else "walk", length, 7, index, LONG_CHAINS)
    return {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": problem.prompt}],
        "max_tokens": length,
        "temperature": 1.0 if index % 3 == 0 else 0.0,
        "seed": 1000 + index,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream_all(
    stack: Stack, *, n_events: int | None = None, then: Callable[[], None] = lambda: None
) -> list[Streamed]:
    """Run all streams at once, and call `then` at the `n_events`-th event of all of them together.
    Raises AssertionError for a stream that ends without a finish."""
    seen = itertools.count(1)

    def count() -> None:
        if next(seen) == n_events:
            then()

    limits = httpx.Limits(max_connections=None)
    url = stack.endpoints.gateway_url
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return list(await asyncio.gather(*(_stream(client, body, count) for body in bodies())))


async def load_records(stack: Stack, streams: Sequence[Streamed]) -> list[RequestRecord]:
    """The stored records of the streams."""
    async with _store(stack) as store:
        records = await store.load([stream.request_id for stream in streams])
    found = [record for record in records if record is not None]
    assert len(found) == len(streams)
    return found


async def load_deltas(stack: Stack, streams: Sequence[Streamed]) -> list[list[Delta]]:
    """The steps of the streams, as they are stored."""
    async with _store(stack) as store:
        return [await store.deltas(stream.request_id) for stream in streams]


async def stream_one(client: httpx.AsyncClient, body: Mapping[str, object]) -> Streamed:
    """One stream to its end. Raises AssertionError for one that fails."""
    return await _stream(client, body, lambda: None)


class Replayer:
    """Denoises streams again, alone, from what the store says of them. A history seen before is
    not denoised twice: `reproduce` is a pure function of it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = load_model(MODEL)
        self._reports: dict[bytes, ReplayReport] = {}

    async def replay(self, stack: Stack, streams: Sequence[Streamed]) -> list[ReplayReport]:
        """One report per stream."""
        records = await load_records(stack, streams)
        async with _store(stack) as store:
            histories = [await store.deltas(stream.request_id) for stream in streams]
        return [
            self._replay(record, msgspec.convert(deltas, list[RecordedStep], from_attributes=True))
            for record, deltas in zip(records, histories, strict=True)
        ]

    def _replay(self, record: RequestRecord, steps: list[RecordedStep]) -> ReplayReport:
        prompt, spec = record.request.prompt, record.request.spec
        key = msgspec.json.encode((prompt, spec, steps, record.canvas))
        if key not in self._reports:
            n_tokens = len(prompt) + spec.n_output
            self._reports[key] = reproduce(
                lambda: engine_for_one(self._model, cache_mode="dual", n_tokens=n_tokens),
                prompt,
                spec,
                steps,
                record.canvas,
            )
        return self._reports[key]


@asynccontextmanager
async def _store(stack: Stack) -> AsyncIterator[Store]:
    store = await connect_redis(stack.endpoints.redis_url)
    try:
        yield store
    finally:
        await store.close()


async def _stream(
    client: httpx.AsyncClient, body: Mapping[str, object], count: Callable[[], None]
) -> Streamed:
    text, finish_reason, n_tokens, request_id = "", "", 0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        request_id = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == f"data: {DONE}":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                count()
                finish_reason = choice["finish_reason"] or finish_reason
            n_tokens = (event.get("usage") or {}).get("completion_tokens", n_tokens)
    assert finish_reason == "length", (request_id, text, finish_reason)
    return Streamed(request_id, text, finish_reason, n_tokens)
