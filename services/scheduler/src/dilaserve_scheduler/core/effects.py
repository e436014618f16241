"""What the core wants done. A store call carries an `op`, and its answer must come back as the
event with that `op`, however long it takes; everything else may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilaserve.messages import Admitted, Cancelled, Refused, StepCommand
from dilaserve.plan_messages import Drained, NotDrained

__all__ = [
    "Admit",
    "AnswerDrain",
    "Ask",
    "Effect",
    "Ended",
    "Fail",
    "FailCause",
    "ListActive",
    "Load",
    "Log",
    "MoveCause",
    "RaiseTerm",
    "Reassign",
    "Reply",
    "Send",
]

MoveCause = Literal["died", "left", "misplaced", "placed", "moved", "shelved", "fenced"]
"""died: its owner is dead; left: its owner went on purpose; misplaced: its owner is gone or
refused before it got the request; placed: it was parked; moved: the policy wants it elsewhere;
shelved: the policy lets others go first; fenced: memory and store disagree, or the store was
restarted."""

FailCause = Literal["poison", "never_fits", "invalid", "cancelled", "unheeded", "timed_out"]


@dataclass(slots=True)  # one for most events: frozen, it would take twice as long
class Send:
    """Publish a command; may be lost. `first` are the requests of which the instance has not yet
    shown that it holds them at this epoch."""

    instance_id: str
    command: StepCommand
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Admit:
    """Store.admit. `owner` is an instance id, or empty to park; `min_epoch` is above all that the
    request ever had, should the store have lost its admission."""

    op: int
    request_id: str
    owner: str
    min_epoch: int = 1


@dataclass(frozen=True, slots=True)
class Reassign:
    """Store.reassign. `owner` is an instance id, or empty to park."""

    op: int
    request_id: str
    owner: str
    expected_epoch: int
    cause: MoveCause
    min_epoch: int = 0
    owner_died: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Store.fail, with a message for the client."""

    op: int
    request_id: str
    error: str
    cause: FailCause


@dataclass(frozen=True, slots=True)
class Load:
    """Store.load."""

    op: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListActive:
    """Store.active."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer everybody who waits for this request's submission or cancellation."""

    request_id: str
    answer: Admitted | Refused | Cancelled


@dataclass(frozen=True, slots=True)
class AnswerDrain:
    """Answer everybody who waits for what became of a Drain."""

    answer: Drained | NotDrained


@dataclass(frozen=True, slots=True)
class Ended:
    """The core has forgotten the request: finished, cancelled, failed or refused."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RaiseTerm:
    """Somebody has seen a higher term: hold the lease above it (answer: TermRaised), or stop."""

    above: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A question of the policy's to the outside, opaque to the core (answer: Told)."""

    query: object


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the operator."""

    level: Literal["info", "warning"]
    text: str


Effect = (
    Send
    | Admit
    | Reassign
    | Fail
    | Load
    | ListActive
    | Reply
    | AnswerDrain
    | Ended
    | RaiseTerm
    | Ask
    | Log
)
