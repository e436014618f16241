"""Requests, commits and canvases for tests of anything that uses a store."""

from __future__ import annotations

import uuid
from typing import Any

from dilaserve.messages import ConfidenceStats
from dilaserve.store import Store
from dilaserve.store.records import (
    MASKED,
    Commit,
    DecodingSpec,
    Delta,
    NewRequest,
    RequestRecord,
    ServiceLevel,
)

N_OUTPUT = 8
STATS = ConfidenceStats(min=0.1, q25=0.25, median=0.5, mean=0.512345678901234, q75=0.75)


def new_request(**changes: Any) -> NewRequest:
    """A request with an id of its own and something in every field."""
    values: dict[str, Any] = {
        "request_id": f"r-{uuid.uuid4().hex[:12]}",
        "model_id": "tiny",
        "prompt": [5, 0, 126335],
        "spec": DecodingSpec(n_output=N_OUTPUT, block_length=4, seed=2**53 - 1, temperature=0.7),
        "level": ServiceLevel(slo_ms=1500, priority=2, min_confidence=0.6),
        "gateway_id": "gateway-ab12",
        "arrival_s": 1764441600.123456,
        "tenant": "größe",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    return NewRequest(**(values | changes))


def step_of(request_id: str, step: int, tokens: dict[int, int], **changes: Any) -> Commit:
    """The commit of one step that unmasks `tokens` (position → token)."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "epoch": 1,
        "step": step,
        "block": 0,
        "kind": "recompute" if step == 1 else "cache",
        "threshold": 0.9,
        "worker": "w1",
        "latency_ms": 12.5,
        "cache_mode": "prefix",
        "positions": list(tokens),
        "tokens": list(tokens.values()),
        "confidences": [0.91 + position / 1000 for position in tokens],
        "stats": STATS,
    }
    return Commit(**(values | changes))


async def admitted(store: Store, owner: str = "w1", term: int = 1, **changes: Any) -> str:
    """The id of a new request that was admitted with epoch 1."""
    request = new_request(**changes)
    await store.new(request)
    answer = await store.admit(request.request_id, term=term, owner=owner)
    if answer.outcome != "admitted":
        raise LookupError(f"{request.request_id} was not admitted: {answer}")
    return request.request_id


async def record_of(store: Store, request_id: str) -> RequestRecord:
    """The record, which must exist."""
    [record] = await store.load([request_id])
    if record is None:
        raise LookupError(f"no record of {request_id}")
    return record


def canvas_of(**tokens: int) -> list[int]:
    """p0=7 → the canvas with token 7 at position 0 and the rest masked."""
    canvas = [MASKED] * N_OUTPUT
    for name, token in tokens.items():
        canvas[int(name[1:])] = token
    return canvas


def delta_of(commit: Commit) -> Delta:
    """The stream entry that a commit without a gap leaves."""
    fields = {name: getattr(commit, name) for name in Delta.__struct_fields__}
    return Delta(**fields)
