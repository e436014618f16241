"""What the service tells the engine's process, and what that one says: lists of tagged structs in
MessagePack. Orders are obeyed in their order, between two passes."""

from __future__ import annotations

import msgspec

from dilaserve.messages import InstanceInfo
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest
from dilaserve_gpu_worker.engine.validate import Limits

__all__ = [
    "Add",
    "Allow",
    "End",
    "Ended",
    "Idle",
    "Limit",
    "Lost",
    "Order",
    "PassDone",
    "Ping",
    "Pong",
    "Ready",
    "Remove",
    "Report",
    "SetCredit",
]


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Add(_Message, frozen=True):
    """Hold a request, which has been checked."""

    request: EngineRequest


class SetCredit(_Message, frozen=True):
    """Replace the credit of a held request."""

    request_id: str
    credit: Credit


class Limit(_Message, frozen=True):
    """Most tokens of the rows of a pass that compute their whole length; None: no limit."""

    n_tokens: int | None


class Remove(_Message, frozen=True):
    """Forget a request."""

    request_id: str


class Allow(_Message, frozen=True):
    """One more pass may run, as soon as there is work for it."""


class End(_Message, frozen=True):
    """Run no more passes."""


Order = Add | SetCredit | Limit | Remove | Allow | End


class Ping(_Message, frozen=True):
    """Instead of orders: say at once whether the process, and those of the other ranks, run, in the
    middle of a pass, too."""


class Pong(_Message, frozen=True):
    """They do."""


class Ready(_Message, frozen=True, kw_only=True):
    """The model is loaded and has run."""

    info: InstanceInfo
    limits: Limits
    words: str
    """What was loaded and how it runs, for the log."""


class PassDone(_Message, frozen=True, kw_only=True):
    """A pass has ended."""

    output: BatchOutput
    n_orders: int
    """Orders that were obeyed before it began."""
    n_free_kv_tokens: int


class Idle(_Message, frozen=True, kw_only=True):
    """There is nothing to do, and the free part of the KV pool has changed."""

    n_free_kv_tokens: int


class Lost(_Message, frozen=True, kw_only=True):
    """The engine cannot go on."""

    reason: str


class Ended(_Message, frozen=True):
    """The last pass has ended, and its report stands before this one."""


Report = Ready | PassDone | Idle | Lost | Ended | Pong
