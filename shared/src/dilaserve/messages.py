"""Every message that crosses a process boundary over NATS, as JSON (DESIGN section 4).

One tagged union per direction, one encoder, one decoder per union. Unknown fields are skipped;
an unknown tag and an absurd value raise `msgspec.DecodeError`; receivers count, log and drop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

CacheMode = Literal["none", "prefix", "dual"]
StepKind = Literal["recompute", "cache"]
FinishReason = Literal["stop", "length"]
CommitOutcome = Literal["committed", "duplicate", "fenced", "gap", "terminal"]

Count = Annotated[int, Meta(ge=0, le=2**40)]
"""Far above anything real, and exact in JSON and in Lua: a term beyond would be kept for ever."""
Number = Annotated[int, Meta(ge=-(2**40), le=2**40)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
WORD = r"^[A-Za-z0-9_-]{1,256}\Z"
Word = Annotated[str, Meta(pattern=WORD)]
"""One token of a subject."""

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all messages: frozen, keyword-only, tagged by `type`."""


# --- gateway → scheduler (request-reply) ---------------------------------------------------------


class Submit(Message, frozen=True, tag="submit"):
    """Ask for admission of a request whose record is stored as `new`. Idempotent by request id."""

    request_id: RequestId
    model_id: str
    n_prompt: Count
    """Prompt length in tokens."""
    n_output: Count
    """Canvas length in tokens."""
    block_length: Count
    arrival_s: float
    """Wall-clock arrival at the gateway, seconds since the epoch."""
    slo_ms: Count | None = None
    priority: Number = 0
    min_confidence: float | None = None


class Cancel(Message, frozen=True, tag="cancel"):
    """The client left or a stop string was found; the record is marked by the gateway itself."""

    request_id: RequestId


class StatusQuery(Message, frozen=True, tag="status_query"):
    """Ask the scheduler what it knows of instances and requests."""


class Admitted(Message, frozen=True, tag="admitted"):
    """The request will be served."""

    request_id: RequestId
    predicted_finish_s: float
    """Predicted seconds from now to the last token."""
    threshold: float
    """The confidence threshold expected for its first step."""


class Refused(Message, frozen=True, tag="refused"):
    """The request will not be served now (`retry_after_s`) or ever (`retry_after_s` is None)."""

    request_id: RequestId
    reason: str
    code: Literal["overloaded", "no_instance", "never_fits", "unknown", "finished", "unavailable"]
    """`unknown`: no such record; `finished`: it has ended; `unavailable`: the store does not answer
    the scheduler, or the message made no sense to it."""
    retry_after_s: float | None = None


class Cancelled(Message, frozen=True, tag="cancelled"):
    """Answer to Cancel; `known` is False for a request that the scheduler does not hold."""

    request_id: RequestId
    known: bool


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the scheduler sees it."""

    info: InstanceInfo
    state: Literal["live", "dead", "draining"]
    n_requests: Count
    n_tokens: Count
    heartbeat_age_s: float


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One active request as the scheduler sees it."""

    request_id: RequestId
    state: str
    instance_id: Word | None
    epoch: Count
    step: Count
    n_unmasked: Count
    n_output: Count
    threshold: float


class Status(Message, frozen=True, tag="status"):
    """Answer to StatusQuery."""

    term: Count
    instances: list[InstanceStatus]
    requests: list[RequestStatus]


# --- scheduler → worker --------------------------------------------------------------------------


class StepItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Credit for one request; upserts. The worker may run step `s` of block `b` by itself exactly
    if `b <= until_block` and (`until_step` is None or `s <= until_step`). Both are absolute, so a
    repeated command does no harm. Blocks count from 0, steps from 1.
    """

    request_id: RequestId
    epoch: Count
    threshold: float
    until_block: Count
    until_step: Count | None = None
    traceparent: str = ""
    """W3C trace context of the placement; set when an epoch is first sent to an instance."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Forget this request if it is held at this epoch or a lower one."""

    request_id: RequestId
    epoch: Count


class StepCommand(Message, frozen=True, tag="step_command"):
    """All credits and releases that changed for one instance. Absence means nothing.

    A command whose (term, seq) is not above the last one applied is ignored.
    """

    term: Count
    seq: Count
    items: list[StepItem] = []
    releases: list[Release] = []
    recompute_tokens: Count | None = None
    """Most tokens of those rows of a pass that compute their whole length (recompute and rebuild
    steps), from now on; one such row always may run. None: as many as the pass may have."""


class StopCommand(Message, frozen=True, tag="stop_command"):
    """End the process after the step in flight; sent by whoever launched it."""

    reason: str = ""


# --- worker → scheduler --------------------------------------------------------------------------


class ConfidenceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics over all output positions of a request, in every cache mode. The confidence of a
    position: that with which it was committed; else the softmax probability of its most likely
    token, from the last recompute step for positions behind the block, from the last step for
    those of the block. It does not depend on which instances ran the steps; where the store has
    lost the confidence of a committed token, 0 stands for it.
    """

    min: float
    q25: float
    median: float
    mean: float
    q75: float


NOTHING_COMPUTED = ConfidenceStats(min=0.0, q25=0.0, median=0.0, mean=0.0, q75=0.0)
"""Before the first step."""


class StepItemResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did to one request, after the store has answered its commit."""

    request_id: RequestId
    epoch: Count
    step: Count
    """Number of the step reported, from 1."""
    block: Count
    """Block that the step worked on, from 0."""
    kind: StepKind
    threshold: float
    outcome: CommitOutcome
    n_new: Count
    """Tokens unmasked by this step."""
    n_unmasked: Count
    """Output tokens unmasked in all."""
    n_block_masked: Count
    """Positions of `block` still masked after the step."""
    confidence: ConfidenceStats
    finish_reason: FinishReason | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A credited request that the instance cannot run."""

    request_id: RequestId
    epoch: Count
    reason: Literal["unknown", "terminal", "fenced", "never_fits", "invalid"]
    detail: str = ""


class StepResult(Message, frozen=True, tag="step_result"):
    """One forward pass of one instance."""

    instance_id: Word
    batch: Count
    """Number of the pass on this instance, from 1."""
    latency_ms: float
    """Plan, forward and unmask, without the commit."""
    n_tokens: Count
    """Tokens computed in the pass, over all rows."""
    n_rebuilds: Count = 0
    """Rows of the pass that only rebuilt a KV cache."""
    items: list[StepItemResult] = []
    rejected: list[Rejected] = []


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance is. `name` survives a restart of its process, `instance_id` does not."""

    instance_id: Word
    name: Word
    model_id: str
    weights_hash: str
    tp_degree: Count
    cache_mode: CacheMode
    block_length: Count
    max_batch_tokens: Count
    n_kv_tokens: Count
    """Size of the KV pool in tokens; 0 without a cache."""
    max_sequence_length: Count
    host: str
    pid: Count
    device: str = "cpu"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an instance holds, and its last committed step."""

    request_id: RequestId
    epoch: Count
    step: Count


class InstanceUp(Message, frozen=True, tag="instance_up"):
    """An instance has loaded its weights and takes commands."""

    info: InstanceInfo


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Sent every 250 ms; an instance silent for 2 s counts as dead."""

    info: InstanceInfo
    term: Count
    seq: Count
    """(term, seq) of the last command applied."""
    n_free_kv_tokens: Count
    holds: list[Held] = []


class InstanceDown(Message, frozen=True, tag="instance_down"):
    """An instance leaves on purpose; what it held is to be placed elsewhere."""

    instance_id: Word
    reason: str = ""


# --- worker → gateway ----------------------------------------------------------------------------


class TokenDelta(Message, frozen=True, tag="token_delta"):
    """The committed tokens of one step: a hint, the request's stream in the store is the truth."""

    request_id: RequestId
    epoch: Count
    step: Count
    positions: list[Count]
    """Canvas positions, from 0 at the first output token."""
    tokens: list[TokenId]
    confidences: list[float]
    kind: StepKind
    threshold: float
    worker: Word
    """Instance id of the one who ran the step."""
    rebuilt: bool = False
    """Whether a pass before this step only rebuilt the request's KV cache."""
    finish_reason: FinishReason | None = None


# --- scheduler ↔ step predictor ------------------------------------------------------------------


class StepQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its last step left it; the predictor derives the features."""

    request_id: RequestId
    step: Count
    """Steps run."""
    n_output: Count
    block_length: Count
    n_unmasked: Count
    block: Count
    """Block that the next step works on, from 0."""
    n_block_masked: Count
    """Positions of that block still masked."""
    confidence: ConfidenceStats


class PredictSteps(Message, frozen=True, tag="predict_steps"):
    """How many steps are left of these requests, if they kept each of these thresholds."""

    model_id: str
    thresholds: list[float]
    questions: list[StepQuestion]


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Remaining steps of a request by threshold, as of `step`; not monotone in the threshold."""

    request_id: RequestId
    step: Count
    p50: list[float]
    upper: list[float]
    """An upper quantile (80 %)."""


class StepsPredicted(Message, frozen=True, tag="steps_predicted"):
    """Answer to PredictSteps; thresholds in the order of the question."""

    model_id: str
    thresholds: list[float]
    answers: list[StepAnswer]
    refresh_tokens: Count | None = None
    """Newly unmasked tokens after which to ask again, as measured when the predictor was trained
    (the paper's 5 % rule, section 3.2.3)."""


GatewayToScheduler = Submit | Cancel | StatusQuery
SchedulerReply = Admitted | Refused | Cancelled | Status
ToWorker = StepCommand | StopCommand
WorkerEvent = StepResult | InstanceUp | Heartbeat | InstanceDown
ToGateway = TokenDelta
ToPredictor = PredictSteps
FromPredictor = StepsPredicted


def _decoder(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`decode`, for which too deep a nesting is one more way of being malformed."""

    def decode_message(data: bytes) -> T:
        try:
            return decode(data)
        except RecursionError as error:
            raise msgspec.DecodeError("nested too deeply") from error

    return decode_message


decode_request = _decoder(msgspec.json.Decoder(GatewayToScheduler).decode)
decode_reply = _decoder(msgspec.json.Decoder(SchedulerReply).decode)
decode_to_worker = _decoder(msgspec.json.Decoder(ToWorker).decode)
decode_worker_event = _decoder(msgspec.json.Decoder(WorkerEvent).decode)
decode_to_gateway = _decoder(msgspec.json.Decoder(ToGateway).decode)
decode_to_predictor = _decoder(msgspec.json.Decoder(ToPredictor).decode)
decode_from_predictor = _decoder(msgspec.json.Decoder(FromPredictor).decode)
encode = msgspec.json.encode
