"""Records, commits and stream entries as Redis keeps them: token ids of prompt and canvas as int32
bytes, everything else readable."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from dilaserve.lifecycle import State
from dilaserve.messages import (
    CacheMode,
    ConfidenceStats,
    Count,
    FinishReason,
    StepKind,
    TokenId,
    Word,
)
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
_to_positions = msgspec.json.Decoder(list[Count]).decode
_to_tokens = msgspec.json.Decoder(list[TokenId]).decode
_to_floats = msgspec.json.Decoder(list[float]).decode


class DamagedError(ValueError):
    """What a key holds was not written by DiLaServe, or has been damaged since."""


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
        int(commit.rebuilt),
        commit.weights_hash,
    ]


def to_record(fields: Mapping[bytes, bytes]) -> RequestRecord:
    """The record in a hash. Raises DamagedError."""
    with _damage_found():
        text = {name.decode(): value for name, value in fields.items()}
        record = RequestRecord(
            request=_to_request(text),
            state=msgspec.convert(text["state"].decode(), State),
            epoch=int(text["epoch"]),
            term=int(text["term"]),
            owner=text["owner"].decode(),
            attempts=int(text["attempts"]),
            step=int(text["step"]),
            canvas=unpack_tokens(text["canvas"]),
            stats=_to_stats(text["stats"]) if "stats" in text else None,
            finish_reason=_to_finish_reason(text.get("finish_reason", b"")),
            error=text.get("error", b"").decode(),
            ended_s=float(text["ended_s"]) if "ended_s" in text else None,
            weights_hash=text.get("weights_hash", b"").decode(),
        )
        spec = record.request.spec
        if spec.block_length < 1 or len(record.canvas) != spec.n_output:
            raise DamagedError(f"{len(record.canvas)} tokens of canvas do not fit {spec}")
        return record


def to_delta(fields: Mapping[bytes, bytes]) -> Delta:
    """The step in a stream entry. Raises DamagedError."""
    with _damage_found():
        return Delta(
            step=int(fields[b"step"]),
            epoch=int(fields[b"epoch"]),
            block=int(fields[b"block"]),
            kind=msgspec.convert(fields[b"kind"].decode(), StepKind),
            threshold=float(fields[b"threshold"]),
            worker=fields[b"worker"].decode(),
            latency_ms=float(fields[b"latency_ms"]),
            positions=_to_positions(fields[b"positions"]),
            tokens=_to_tokens(fields[b"tokens"]),
            confidences=_to_floats(fields[b"confidences"]),
            cache_mode=msgspec.convert(fields[b"cache_mode"].decode(), CacheMode),
            rebuilt=bool(int(fields[b"rebuilt"])),
            finish_reason=_to_finish_reason(fields[b"finish_reason"]),
        )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little endian."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Token ids from int32, little endian."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def _to_request(text: Mapping[str, bytes]) -> NewRequest:
    return NewRequest(
        request_id=text["request_id"].decode(),
        model_id=text["model_id"].decode(),
        prompt=unpack_tokens(text["prompt"]),
        spec=_to_spec(text["spec"]),
        level=_to_level(text["level"]),
        gateway_id=msgspec.convert(text["gateway_id"].decode(), Word),
        arrival_s=float(text["arrival_s"]),
        tenant=text["tenant"].decode(),
        traceparent=text["traceparent"].decode(),
    )


def _to_finish_reason(text: bytes) -> FinishReason | None:
    return msgspec.convert(text.decode(), FinishReason) if text else None


@contextmanager
def _damage_found() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise DamagedError(f"the field {error} is missing") from error
    except (ValueError, struct.error, RecursionError) as error:
        raise DamagedError(str(error)) from error
