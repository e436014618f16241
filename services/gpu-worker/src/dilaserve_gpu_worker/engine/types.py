"""What goes into the engine and what comes out: the contract between engine and service.

The engine knows no bus, no store, no tokenizer and no clock but a duration counter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dilaserve.errors import DiLaServeError
from dilaserve.messages import ConfidenceStats, FinishReason, StepKind
from dilaserve.store.records import DecodingSpec


class NeverFitsError(DiLaServeError, ValueError):
    """A request too long for the model, the token budget or the KV pool, even when alone."""


class NotFiniteError(DiLaServeError, FloatingPointError):
    """The model computed NaN: nothing that it says can be used."""


class EngineLostError(DiLaServeError):
    """A part of the engine has died: it cannot go on, and neither can its instance."""


@dataclass(slots=True)
class Credit:
    """How far a request may go by itself, and at which threshold (see messages.StepItem)."""

    threshold: float
    until_block: int
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it is handed to the engine; a fresh one has step 0 and an all-masked canvas."""

    request_id: str
    prompt: list[int]
    spec: DecodingSpec
    step: int
    """Last committed step."""
    canvas: list[int]
    """Committed token per position, store.records.MASKED where masked."""
    credit: Credit
    quota: int | None = None
    """Reference decoding: unmask exactly this many tokens a step instead of by threshold."""
    confidences: list[float] | None = None
    """Per canvas position, the confidence with which it was committed, for the statistics of
    steps to come; 0 where masked or not known. None: none is known."""


@dataclass(slots=True)  # one for each row of each pass: frozen, it would take 2.5 times as long
class StepOutput:
    """What one step did to one request; already applied to the engine's own canvas."""

    request_id: str
    step: int
    block: int
    kind: StepKind
    threshold: float
    positions: list[int]
    """Canvas positions unmasked, ascending, from 0 at the first output token."""
    tokens: list[int]
    confidences: list[float]
    stats: ConfidenceStats
    n_unmasked: int
    n_block_masked: int
    finish_reason: FinishReason | None
    rebuilt: bool = False
    """Whether a pass before it only rebuilt the request's cache."""


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """One forward pass. A finished request stays held until `remove`, and is not run again."""

    latency_s: float
    n_tokens: int
    n_rebuilds: int
    """Rows that only rebuilt a KV cache in this pass; they have no StepOutput."""
    steps: list[StepOutput] = field(default_factory=list)
