"""Records, commits and stream entries as Redis keeps them: token ids of prompt and canvas as int32
bytes, everything else readable."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dilaserve.messages import ConfidenceStats
from dilaserve.store.records import (
    Commit,
    DecodingSpec,
    Delta,
    NewRequest,
    RequestRecord,
    ServiceLevel,
)

Field = str | bytes | int | float

_to_json = msgspec.json.encode
_to_spec = msgspec.json.Decoder(DecodingSpec).decode
_to_level = msgspec.json.Decoder(ServiceLevel).decode
_to_stats = msgspec.json.Decoder(ConfidenceStats).decode
_to_ints = msgspec.json.Decoder(list[int]).decode
_to_floats = msgspec.json.Decoder(list[float]).decode


def request_fields(request: NewRequest) -> list[Field]:
    """Names and values of the hash fields that the gateway writes, alternating."""
    return [
        *("request_id", request.request_id),
        *("model_id", request.model_id),
        *("gateway_id", request.gateway_id),
        *("tenant", request.tenant),
        *("arrival_s", request.arrival_s),
        *("traceparent", request.traceparent),
        *("spec", _to_json(request.spec)),
        *("level", _to_json(request.level)),
        *("prompt", pack_tokens(request.prompt)),
    ]


def commit_arguments(commit: Commit) -> list[Field]:
    """Arguments of the function `dls_commit`, after id and retention."""
    return [
        commit.epoch,
        commit.step,
        commit.block,
        commit.kind,
        commit.threshold,
        commit.worker,
        commit.latency_ms,
        _to_json(commit.positions),
        _to_json(commit.tokens),
        _to_json(commit.confidences),
        commit.finish_reason or "",
        _to_json(commit.stats),
        pack_tokens(commit.positions),
        pack_tokens(commit.tokens),
        pack_tokens(commit.canvas) if commit.canvas is not None else b"",
        commit.cache_mode,
    ]


def to_record(fields: Mapping[bytes, bytes]) -> RequestRecord:
    """The record in a hash."""
    text = {name.decode(): value for name, value in fields.items()}
    request = NewRequest(
        request_id=text["request_id"].decode(),
        model_id=text["model_id"].decode(),
        prompt=unpack_tokens(text["prompt"]),
        spec=_to_spec(text["spec"]),
        level=_to_level(text["level"]),
        gateway_id=text["gateway_id"].decode(),
        arrival_s=float(text["arrival_s"]),
        tenant=text["tenant"].decode(),
        traceparent=text["traceparent"].decode(),
    )
    state: Any = text["state"].decode()
    finish_reason: Any = text.get("finish_reason", b"").decode() or None
    return RequestRecord(
        request=request,
        state=state,
        epoch=int(text["epoch"]),
        term=int(text["term"]),
        owner=text["owner"].decode(),
        attempts=int(text["attempts"]),
        step=int(text["step"]),
        canvas=unpack_tokens(text["canvas"]),
        stats=_to_stats(text["stats"]) if "stats" in text else None,
        finish_reason=finish_reason,
        error=text.get("error", b"").decode(),
    )


def to_delta(fields: Mapping[bytes, bytes]) -> Delta:
    """The step in a stream entry."""
    kind: Any = fields[b"kind"].decode()
    cache_mode: Any = fields[b"cache_mode"].decode()
    finish_reason: Any = fields[b"finish_reason"].decode() or None
    return Delta(
        step=int(fields[b"step"]),
        epoch=int(fields[b"epoch"]),
        block=int(fields[b"block"]),
        kind=kind,
        threshold=float(fields[b"threshold"]),
        worker=fields[b"worker"].decode(),
        latency_ms=float(fields[b"latency_ms"]),
        positions=_to_ints(fields[b"positions"]),
        tokens=_to_ints(fields[b"tokens"]),
        confidences=_to_floats(fields[b"confidences"]),
        cache_mode=cache_mode,
        finish_reason=finish_reason,
    )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little endian."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Token ids from int32, little endian."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))
