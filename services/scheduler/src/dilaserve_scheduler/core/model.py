"""Requests and instances as the scheduler remembers them. Plain data that policies may read.

Blocks count from 0, steps from 1, times are seconds on the clock of `now`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dilaserve.messages import Admitted, InstanceInfo
from dilaserve_scheduler.core.effects import Admit, Fail, Reassign
from dilaserve_scheduler.core.state import RequestEvent, RequestState, next_state

__all__ = ["Instance", "InstanceState", "Request"]

InstanceState = Literal["expected", "live", "dead"]
"""expected: a stored record names it, but it has not been heard yet."""


@dataclass(slots=True, eq=False)
class Instance:
    """A worker's instance, and the load that is placed on it."""

    instance_id: str
    name: str
    number: int
    """Order of joining; breaks ties."""
    info: InstanceInfo | None = None
    """None while only expected."""
    model_id: str = ""
    weights_hash: str = ""
    token_budget: int = 0
    """Most tokens of full length that it holds at a time."""
    capacity: int = 0
    """Longest request (prompt + output) that it can ever run."""
    state: InstanceState = "expected"
    is_draining: bool = False
    """Whether it is to get empty: nothing is placed there any more."""
    heard_at: float = 0.0
    heard_mark: float = 0.0
    """`heard_at` on the clock that runs only while anybody is heard (see membership)."""
    seq: int = 0
    """Of the last command sent under the present term."""
    step_s: float = 0.0
    """Recent latency of a forward pass, smoothed; 0 before the first."""
    n_tokens: int = 0
    """Full lengths (prompt + output) of its requests, those on their way to it included."""
    n_free_kv_tokens: int = 0
    recompute_tokens: int | None = None
    """Most tokens of the rows of a pass that compute their whole length; None: no limit."""
    requests: dict[str, Request] = field(default_factory=dict)
    """Those it owns, and those on their way to it."""

    def learn(self, info: InstanceInfo) -> None:
        """Take over what the instance says of itself."""
        self.info = info
        self.model_id = info.model_id
        self.weights_hash = info.weights_hash
        self.token_budget = min(info.max_batch_tokens, info.n_kv_tokens or info.max_batch_tokens)
        self.capacity = min(info.max_sequence_length, self.token_budget)

    @property
    def limit(self) -> str:
        """What makes its `capacity` no larger."""
        if self.info is None or self.capacity == self.info.max_sequence_length:
            return "the model's length"
        if self.capacity == self.info.max_batch_tokens:
            return "its DILASERVE_MAX_BATCH_TOKENS"
        return "its KV pool, DILASERVE_KV_TOKENS"

    def fits(self, request: Request) -> bool:
        """Whether it could run the request if it were empty."""
        return (
            self.model_id == request.model_id
            and request.weights_hash in ("", self.weights_hash)
            and request.n_tokens <= self.capacity
            and self.instance_id not in request.refused_by
        )

    def has_room(self, request: Request) -> bool:
        """Whether the request fits beside what is placed there now."""
        fits_now = self.n_tokens + request.n_tokens <= self.token_budget
        return fits_now and not self.is_draining and self.fits(request)


@dataclass(slots=True, eq=False)
class Request:
    """One request from submission to its end."""

    request_id: str
    model_id: str
    n_prompt: int
    n_output: int
    block_length: int
    arrival_s: float
    slo_s: float | None = None
    priority: int = 0
    min_confidence: float | None = None

    weights_hash: str = ""
    """Of the weights that its steps were computed with, once there is one; those with others must
    not go on with it."""

    # where it is
    state: RequestState = "unknown"
    epoch: int = 0
    attempts: int = 0
    instance: Instance | None = None
    """Its owner; None while submitting or parked, and when its owner is gone."""
    target: Instance | None = None
    """Where the outstanding store call puts it; None parks it."""
    call: Admit | Reassign | Fail | None = None
    """The outstanding store call."""
    load_op: int = 0
    """Of the outstanding Load whose answer may be compared with memory; 0 = none."""
    refused_by: frozenset[str] = frozenset()
    """Instances that said they can never run it."""
    cancelled: bool = False
    """Cancelled while `admit` is outstanding."""
    admitted: Admitted | None = None
    parked_at: float = 0.0
    """When it last began to wait."""

    # how far it is
    step: int = 0
    n_unmasked: int = 0
    block: int = 0
    """The block that the next step works on."""
    n_block_masked: int = 0
    """Positions of that block still masked."""
    pace: float = 0.0
    """Tokens unmasked by a step, smoothed; 0 before the first."""
    n_new: float = 0.0
    """Tokens unmasked by the last step (by each of the last few, where results were lost)."""
    progress_at: float = 0.0

    # what its owner may do
    threshold: float = 0.0
    until_block: int = 0
    until_step: int | None = None
    leaving_for: Instance | None = None
    """Where the policy wants it after the blocks that are credited."""
    is_shelved: bool = False
    """Whether the policy wants it to wait after the blocks that are credited."""
    asked_block: int = -1
    """The last block whose end the policy was asked about."""
    sent_seq: int = 0
    sent_at: float = 0.0
    sent: bool = False
    """Whether its owner was ever sent its credit."""
    confirmed: bool = False
    """Whether its owner has shown that it holds the request at this epoch."""
    nudged_at: float = 0.0
    n_nudges: int = 0
    """Times that something was done about its silence since the last progress."""
    n_unheeded: int = 0
    """Readings of its record that showed nothing, since its owner was told of it."""

    n_tokens: int = field(init=False)
    """Full length."""
    n_blocks: int = field(init=False)
    """Blocks of the canvas; the last may be shorter."""

    def __post_init__(self) -> None:
        self.n_tokens = self.n_prompt + self.n_output
        self.n_blocks = -(-self.n_output // self.block_length)
        self.n_block_masked = self.n_block_masked or min(self.block_length, self.n_output)

    def block_size(self, block: int) -> int:
        """Positions in a block."""
        return min(self.block_length, self.n_output - block * self.block_length)

    @property
    def at_block_start(self) -> bool:
        """Whether the next step is a recompute step."""
        return self.n_block_masked == self.block_size(self.block)

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no more credit where it is."""
        return self.is_shelved or self.leaving_for is not None

    @property
    def placed(self) -> bool:
        """Whether an owner has, or may be sent, its credit."""
        return self.state == "running" and self.instance is not None

    @property
    def has_draining_owner(self) -> bool:
        """Whether it is to leave as soon as somebody else has room."""
        return self.instance is not None and self.instance.is_draining

    @property
    def has_strange_owner(self) -> bool:
        """Whether its owner has other weights than those that its steps were computed with."""
        owner = self.instance
        if not self.placed or owner is None or owner.info is None:
            return False
        return self.weights_hash not in ("", owner.weights_hash)

    def advance(self, event: RequestEvent) -> None:
        """Change state. Raises LifecycleError, changing nothing."""
        self.state = next_state(self.state, event)
