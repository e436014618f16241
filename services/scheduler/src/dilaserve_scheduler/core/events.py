"""What the core is told: wire messages, the store's answers, and what was found in the store.

All times are seconds on the clock of `now`: whoever feeds the core converts `arrival_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilaserve.lifecycle import State
from dilaserve.messages import Cancel, Heartbeat, InstanceDown, InstanceUp, StepResult, Submit
from dilaserve.plan_messages import Drain
from dilaserve.store.records import AdmitAnswer, FailAnswer, ReassignAnswer

__all__ = [
    "ActiveListed",
    "AdmitAnswered",
    "Event",
    "FailAnswered",
    "Loaded",
    "ReassignAnswered",
    "Recovered",
    "StoreRestarted",
    "StoredRequest",
    "TermRaised",
    "Told",
]


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """What the core needs of a stored record."""

    request_id: str
    model_id: str
    n_prompt: int
    n_output: int
    block_length: int
    arrival_s: float
    state: State
    epoch: int
    owner: str
    """Instance id; empty while new or parked."""
    attempts: int
    step: int
    n_unmasked: int
    block: int
    """First block with a masked position (the last block if there is none)."""
    n_block_masked: int
    slo_ms: int | None = None
    priority: int = 0
    min_confidence: float | None = None
    weights_hash: str = ""
    """See RequestRecord."""


@dataclass(frozen=True, slots=True)
class AdmitAnswered:
    """The answer to the effect Admit with the same `op`."""

    op: int
    request_id: str
    answer: AdmitAnswer


@dataclass(frozen=True, slots=True)
class ReassignAnswered:
    """The answer to the effect Reassign with the same `op`."""

    op: int
    request_id: str
    answer: ReassignAnswer


@dataclass(frozen=True, slots=True)
class FailAnswered:
    """The answer to the effect Fail with the same `op`."""

    op: int
    request_id: str
    answer: FailAnswer


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to the effect Load with the same `op`: what there is, and what there is not."""

    op: int
    records: tuple[StoredRequest, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActiveListed:
    """The answer to ListActive: ids of all records that the store calls active."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """All active records, read after the lease was taken and before any other event."""

    records: tuple[StoredRequest, ...]


@dataclass(frozen=True, slots=True)
class StoreRestarted:
    """The store runs under another run id and may have lost its last second of writes."""


@dataclass(frozen=True, slots=True)
class TermRaised:
    """The lease was taken again under a higher term; nobody else decides."""

    term: int


@dataclass(frozen=True, slots=True)
class Told:
    """Something for the policy, opaque to the core: an answer to an Ask, for example."""

    answer: object


Event = (
    Submit
    | Cancel
    | InstanceUp
    | Heartbeat
    | InstanceDown
    | StepResult
    | Drain
    | AdmitAnswered
    | ReassignAnswered
    | FailAnswered
    | Loaded
    | ActiveListed
    | Recovered
    | StoreRestarted
    | TermRaised
    | Told
)
