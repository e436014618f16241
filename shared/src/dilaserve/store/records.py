"""What the store holds and answers. Plain data; knows no server."""

from __future__ import annotations

from typing import Literal

import msgspec

from dilaserve.lifecycle import State
from dilaserve.messages import CacheMode, CommitOutcome, ConfidenceStats, FinishReason, StepKind

__all__ = ["CommitOutcome"]


class DecodingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is decoded; with the thresholds of its steps it determines the text."""

    n_output: int
    """Canvas length in tokens; the last block may be shorter than `block_length`."""
    block_length: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked of latency and quality."""

    slo_ms: int | None = None
    priority: int = 0
    service_tier: str = "default"
    min_confidence: float | None = None


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the gateway writes it."""

    request_id: str
    model_id: str
    prompt: list[int]
    """Prompt token ids; int32 bytes in Redis."""
    spec: DecodingSpec
    level: ServiceLevel
    gateway_id: str
    arrival_s: float
    """Wall-clock seconds since the epoch."""
    tenant: str = ""
    traceparent: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it stands."""

    request: NewRequest
    state: State
    epoch: int
    """0 until admitted; raised by every change of owner."""
    term: int
    owner: str
    """Instance id; empty while new or parked."""
    attempts: int
    """Times its owner died under it."""
    step: int
    """Last committed step, 0 before the first."""
    canvas: list[int]
    """Committed token per position, MASKED where still masked."""
    stats: ConfidenceStats | None = None
    """Confidence statistics of the last committed step."""
    finish_reason: FinishReason | None = None
    error: str = ""
    """Why it failed or was cancelled."""
    ended_s: float | None = None
    """When it ended, in wall-clock seconds since the epoch by the store's clock."""
    weights_hash: str = ""
    """Of the weights that its steps were computed with; empty before the first. Only an instance
    with these may go on with it."""


MASKED = -1
"""Stands for a masked position in a stored canvas, whatever the model's mask token is."""


LOST_CONFIDENCE = 0.0
"""Stands for the confidence of a token whose step the store had lost; no real one is 0."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one request."""

    request_id: str
    epoch: int
    step: int
    block: int
    kind: StepKind
    threshold: float
    worker: str
    latency_ms: float
    positions: list[int]
    """Canvas positions, ascending, from 0 at the first output token; all masked before."""
    tokens: list[int]
    confidences: list[float]
    stats: ConfidenceStats
    cache_mode: CacheMode = "dual"
    rebuilt: bool = False
    """Whether a pass before this step, and after the one before it, only rebuilt its KV cache."""
    weights_hash: str = ""
    finish_reason: FinishReason | None = None
    canvas: list[int] | None = None
    """The whole canvas after this step (MASKED where masked): sent again after a `gap`."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """One stream entry. After a gap, `positions` holds those of the lost steps too, with
    confidence LOST_CONFIDENCE."""

    step: int
    epoch: int
    block: int
    kind: StepKind
    threshold: float
    worker: str
    latency_ms: float
    positions: list[int]
    tokens: list[int]
    confidences: list[float]
    cache_mode: CacheMode = "dual"
    rebuilt: bool = False
    """See Commit."""
    finish_reason: FinishReason | None = None


class AdmitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`admitted` now, `already` active before (epoch, step and owner as stored), `terminal`,
    `missing` (expired or never written) or `stale_term`."""

    outcome: Literal["admitted", "already", "terminal", "missing", "stale_term"]
    epoch: int = 0
    step: int = 0
    owner: str = ""


class ReassignAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored after the call; unchanged unless `reassigned`."""

    outcome: Literal["reassigned", "conflict", "terminal", "missing", "stale_term"]
    epoch: int = 0
    step: int = 0
    owner: str = ""
    attempts: int = 0


class FailAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`terminal` when it had ended before."""

    outcome: Literal["failed", "terminal", "missing", "stale_term"]


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`terminal` when it had ended before."""

    outcome: Literal["cancelled", "terminal", "missing"]


class StoreMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; `limit` is 0 where the server has none."""

    used: int
    limit: int
