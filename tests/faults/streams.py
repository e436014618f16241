"""Twenty concurrent streams whose texts are known, and the replay of each from its record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from dilaserve.store import Store
from dilaserve.store.records import Delta, RequestRecord
from dilaserve.store.redis import connect_redis
from dilaserve.supervisor.stack import Stack
from dilaserve_gpu_worker.engine.alone import engine_for_one
from dilaserve_gpu_worker.models.model import Model
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
    """Requests of one to eight blocks, every third sampled at temperature 1; all with a seed, so
    that a fixed threshold leaves their texts nothing to depend on."""
    return [
        {
            "model": MODEL.name,
            "prompt": f"{i} + {7 * i} =",
            "max_tokens": 32 * (1 + i % 8),
            "temperature": 1.0 if i % 3 == 0 else 0.0,
            "seed": 1000 + i,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i in range(N_STREAMS)
    ]


async def stream_all(stack: Stack) -> list[Streamed]:
    """Run all streams at once. Raises AssertionError for one that ends without a finish."""
    limits = httpx.Limits(max_connections=None)
    url = stack.endpoints.gateway_url
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return list(await asyncio.gather(*(_stream(client, body) for body in bodies())))


async def load_records(stack: Stack, streams: Sequence[Streamed]) -> list[RequestRecord]:
    """The stored records of the streams."""
    async with _store(stack) as store:
        records = await store.load([stream.request_id for stream in streams])
    found = [record for record in records if record is not None]
    assert len(found) == len(streams)
    return found


async def replays(stack: Stack, streams: Sequence[Streamed]) -> list[ReplayReport]:
    """Denoise every stream again, alone, from what the store says of it."""
    records = await load_records(stack, streams)
    async with _store(stack) as store:
        histories = [await store.deltas(stream.request_id) for stream in streams]
    model = load_model(MODEL)
    return [
        _replay(model, record, deltas) for record, deltas in zip(records, histories, strict=True)
    ]


def _replay(model: Model, record: RequestRecord, deltas: list[Delta]) -> ReplayReport:
    prompt, spec = record.request.prompt, record.request.spec
    n_tokens = len(prompt) + spec.n_output
    return reproduce(
        lambda: engine_for_one(model, cache_mode="dual", n_tokens=n_tokens),
        prompt,
        spec,
        msgspec.convert(deltas, list[RecordedStep], from_attributes=True),
        record.canvas,
    )


@asynccontextmanager
async def _store(stack: Stack) -> AsyncIterator[Store]:
    store = await connect_redis(stack.endpoints.redis_url)
    try:
        yield store
    finally:
        await store.close()


async def _stream(client: httpx.AsyncClient, body: Mapping[str, object]) -> Streamed:
    text, finish_reason, n_tokens, request_id = "", "", 0, ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == f"data: {DONE}":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
            n_tokens = (event.get("usage") or {}).get("completion_tokens", n_tokens)
    assert finish_reason == "length", (request_id, text, finish_reason)
    return Streamed(request_id, text, finish_reason, n_tokens)
