"""Drives a core by hand: one event in, the effects out; the test says what the store answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from dilaserve.messages import (
    CommitOutcome,
    ConfidenceStats,
    FinishReason,
    Heartbeat,
    Held,
    InstanceDown,
    InstanceInfo,
    InstanceUp,
    Rejected,
    StepCommand,
    StepItem,
    StepItemResult,
    StepResult,
    Submit,
)
from dilaserve.plan_messages import Drain
from dilaserve.store.records import AdmitAnswer, ReassignAnswer
from dilaserve_scheduler.core import Core, CoreSettings
from dilaserve_scheduler.core.effects import Admit, Effect, Reassign, Send
from dilaserve_scheduler.core.events import (
    AdmitAnswered,
    Event,
    ReassignAnswered,
    StoredRequest,
)
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import PolicyOptions, build_policy

E = TypeVar("E")
BLOCK = 8
MODEL = "m"
STATS = ConfidenceStats(min=0.1, q25=0.3, median=0.5, mean=0.5, q75=0.8)


def info(instance_id: str, **changes: Any) -> InstanceInfo:
    """An instance of the test model with room for 256 tokens."""
    values: dict[str, Any] = {
        "name": instance_id.rpartition("-")[0],
        "model_id": MODEL,
        "weights_hash": "h",
        "tp_degree": 1,
        "cache_mode": "dual",
        "block_length": BLOCK,
        "max_batch_tokens": 256,
        "n_kv_tokens": 256,
        "max_sequence_length": 256,
        "host": "here",
        "pid": 1,
    }
    return InstanceInfo(instance_id=instance_id, **(values | changes))


def stored(request_id: str, **changes: Any) -> StoredRequest:
    """An active record of 8 + 24 tokens, owned by a-0001."""
    values: dict[str, Any] = {
        "model_id": MODEL,
        "n_prompt": 8,
        "n_output": 24,
        "block_length": BLOCK,
        "arrival_s": 0.0,
        "state": "active",
        "epoch": 1,
        "owner": "a-0001",
        "attempts": 0,
        "step": 0,
        "n_unmasked": 0,
        "block": 0,
        "n_block_masked": BLOCK,
    }
    return StoredRequest(request_id=request_id, **(values | changes))


def every(effects: Iterable[Effect], kind: type[E]) -> list[E]:
    """All effects of a kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def only(effects: Iterable[Effect], kind: type[E]) -> E:
    """The one effect of a kind."""
    (effect,) = every(effects, kind)
    return effect


def command(effects: Iterable[Effect], instance_id: str) -> StepCommand:
    """The one command to an instance."""
    (send,) = [send for send in every(effects, Send) if send.instance_id == instance_id]
    return send.command


def item(effects: Iterable[Effect], instance_id: str) -> StepItem:
    """The one item that is sent to an instance."""
    (only_item,) = command(effects, instance_id).items
    return only_item


class Driver:
    """A core at a time that the test moves."""

    def __init__(
        self,
        *instance_ids: str,
        settings: CoreSettings | None = None,
        policy: Policy | None = None,
        term: int = 1,
    ) -> None:
        self.now = 1000.0
        policy = policy or build_policy("infaas", PolicyOptions())
        self.core = Core(policy, settings, term=term)
        for instance_id in instance_ids:
            self.up(instance_id)

    def give(self, event: Event) -> list[Effect]:
        """One event."""
        return self.core.handle(self.now, event)

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass without an event."""
        self.now += seconds
        return self.core.tick(self.now)

    def request(self, request_id: str = "r") -> Request:
        """What the core remembers."""
        (request,) = [r for r in self.core.requests() if r.request_id == request_id]
        return request

    # --- instances -----------------------------------------------------------------------------

    def up(self, instance_id: str, **changes: Any) -> list[Effect]:
        """It joins."""
        return self.give(InstanceUp(info=info(instance_id, **changes)))

    def down(self, instance_id: str) -> list[Effect]:
        """It leaves on purpose."""
        return self.give(InstanceDown(instance_id=instance_id))

    def drain(
        self, instance_id: str, *, resume: bool = False, hold_s: float = 10.0
    ) -> list[Effect]:
        """The planner asks for its emptying."""
        return self.give(Drain(instance_id=instance_id, resume=resume, hold_s=hold_s))

    def beat(
        self, instance_id: str, *holds: tuple[str, int, int], seq: int = 10**6, term: int = 1
    ) -> list[Effect]:
        """Its heartbeat; by default it has applied whatever was sent."""
        held = [Held(request_id=r, epoch=e, step=s) for r, e, s in holds]
        if seq == 10**6:
            known = [i for i in self.core.instances() if i.instance_id == instance_id]
            seq = known[0].seq if known else 0
        return self.give(
            Heartbeat(info=info(instance_id), term=term, seq=seq, n_free_kv_tokens=0, holds=held)
        )

    def beats(self, seconds: float, *instance_ids: str) -> list[Effect]:
        """Time passes, and only these are heard, holding what the core believes."""
        effects = []
        for _ in range(round(seconds / 0.25)):
            effects += self.wait(0.25)
            for instance_id in instance_ids:
                holds = [
                    (r.request_id, r.epoch, r.step)
                    for r in self.core.requests()
                    if r.placed and r.instance and r.instance.instance_id == instance_id
                ]
                effects += self.beat(instance_id, *holds)
        return effects

    def result(
        self,
        instance_id: str,
        request_id: str = "r",
        *,
        step: int,
        n_new: int = 1,
        n_unmasked: int,
        epoch: int = 1,
        outcome: CommitOutcome = "committed",
        finish: FinishReason | None = None,
    ) -> list[Effect]:
        """A pass with one request, whose blocks are unmasked from left to right."""
        block = (n_unmasked - 1) // BLOCK
        return self.give(
            StepResult(
                instance_id=instance_id,
                batch=step,
                latency_ms=20.0,
                n_tokens=32,
                items=[
                    StepItemResult(
                        request_id=request_id,
                        epoch=epoch,
                        step=step,
                        block=block,
                        kind="cache",
                        threshold=0.9,
                        outcome=outcome,
                        n_new=n_new,
                        n_unmasked=n_unmasked,
                        n_block_masked=(block + 1) * BLOCK - n_unmasked,
                        confidence=STATS,
                        finish_reason=finish,
                    )
                ],
            )
        )

    def rejected(self, instance_id: str, reason: Any, *, epoch: int = 1) -> list[Effect]:
        """An instance cannot run request r."""
        rejected = Rejected(request_id="r", epoch=epoch, reason=reason, detail="so it is")
        return self.give(
            StepResult(
                instance_id=instance_id, batch=0, latency_ms=0.0, n_tokens=0, rejected=[rejected]
            )
        )

    # --- requests ------------------------------------------------------------------------------

    def submit(self, request_id: str = "r", **changes: Any) -> list[Effect]:
        """A request of 8 + 24 tokens."""
        values: dict[str, Any] = {
            "model_id": MODEL,
            "n_prompt": 8,
            "n_output": 24,
            "block_length": BLOCK,
            "arrival_s": self.now,
        }
        return self.give(Submit(request_id=request_id, **(values | changes)))

    def admit(self, request_id: str = "r", **changes: Any) -> list[Effect]:
        """Submit it, have the store admit it, and return what follows from that."""
        return self.admitted(only(self.submit(request_id, **changes), Admit))

    def admitted(
        self, call: Admit, outcome: Any = "admitted", *, epoch: int = 1, **changes: Any
    ) -> list[Effect]:
        """The store answers an admission."""
        values = {"owner": call.owner} | changes
        answer = AdmitAnswer(outcome=outcome, epoch=epoch, **values)
        return self.give(AdmitAnswered(call.op, call.request_id, answer))

    def reassigned(
        self, call: Reassign, outcome: Any = "reassigned", **changes: Any
    ) -> list[Effect]:
        """The store answers a reassignment, by default as one that has never failed."""
        values: dict[str, Any] = {
            "epoch": max(call.expected_epoch, call.min_epoch - 1) + 1,
            "owner": call.owner,
            "attempts": int(call.owner_died),
            "step": self.request(call.request_id).step,
        }
        answer = ReassignAnswer(outcome=outcome, **(values | changes))
        return self.give(ReassignAnswered(call.op, call.request_id, answer))
