"""Holds instances to their word: who is there, who is gone, and whether what they hold is right.

Commands and results may be lost, so whatever stands still for too long is asked about again.
"""

from __future__ import annotations

from typing import Literal

from dilaserve.messages import Heartbeat, Held, InstanceDown, InstanceInfo, InstanceUp
from dilaserve_scheduler.core import credit
from dilaserve_scheduler.core.advancing import Advancing
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.core.settings import CoreSettings

__all__ = ["Watching"]

Cause = Literal["died", "left"]


class Watching:
    """Reacts to signs of life, and to their absence."""

    def __init__(
        self,
        policy: Policy,
        members: Members,
        placing: Placing,
        advancing: Advancing,
        outbox: Outbox,
        settings: CoreSettings,
    ) -> None:
        self._policy = policy
        self._members = members
        self._placing = placing
        self._advancing = advancing
        self._outbox = outbox
        self._settings = settings

    def on_up(self, now: float, event: InstanceUp) -> None:
        """An instance says that it has joined."""
        self._hear(now, event.info)

    def on_down(self, now: float, event: InstanceDown) -> None:
        """An instance leaves on purpose."""
        instance = self._members.get(event.instance_id)
        if instance is not None:
            self._members.depart(now, instance, on_purpose=True)
            self._lose(now, instance, "left", f"leaves ({event.reason or 'no reason given'})")

    def on_heartbeat(self, now: float, event: Heartbeat) -> None:
        """An instance lists what it holds."""
        instance = self._hear(now, event.info)
        if event.term > self._outbox.term:
            self._outbox.raise_term(event.term)
        if instance is None or event.term > self._outbox.term:
            return
        applied = event.seq if event.term == self._outbox.term else 0
        instance.seq = max(instance.seq, applied)
        instance.n_free_kv_tokens = event.n_free_kv_tokens
        self._compare(now, instance, applied, event.holds)

    def bury_dead(self, now: float) -> None:
        """Give the requests of instances that have been silent for too long to others."""
        for instance in self._members.take_dead():
            silence_s = now - instance.heard_at
            why = f"is silent for {silence_s:.1f} s" if instance.info else "is not there"
            self._lose(now, instance, "died", why)

    def _hear(self, now: float, info: InstanceInfo) -> Instance | None:
        heard = self._members.hear(now, info)
        if heard is None:
            self._warn_of_namesakes(now, info)
            return None
        instance = heard.instance
        if heard.joined:
            self._outbox.log("info", f"instance {instance.instance_id} joined")
            if not instance.is_draining:
                self._advancing.decide(now, self._policy.joined(now, instance))
            self._placing.stir()
            self._warn_of_differences(instance)
            for request in instance.requests.values():
                self._outbox.credit(request)
        for earlier in heard.replaced:
            self._members.depart(now, earlier, on_purpose=False)
            self._lose(now, earlier, "died", f"was replaced by {instance.instance_id}")
        return instance

    def _warn_of_namesakes(self, now: float, info: InstanceInfo) -> None:
        if self._members.shares_name(now, info.instance_id):
            text = (
                f"two workers are called {info.name!r}, and {info.instance_id}, the earlier one, "
                "gets no work; give each a DILASERVE_WORKER_NAME of its own"
            )
            self._outbox.log("warning", text)

    def _warn_of_differences(self, instance: Instance) -> None:
        """Texts depend on weights and cache mode, and requests move."""
        others = [i for i in self._members if i is not instance and i.state == "live"]
        kind = _kind(instance)
        for other in others:
            if other.model_id == instance.model_id and _kind(other) != kind:
                text = (
                    f"{instance.instance_id} serves {instance.model_id!r} with {kind}, and "
                    f"{other.instance_id} with {_kind(other)}: a request that moves between them "
                    "changes its course; restart whichever is out of date"
                )
                self._outbox.log("warning", text)
                return

    def _lose(self, now: float, instance: Instance, cause: Cause, why: str) -> None:
        owned = [r for r in instance.requests.values() if r.placed and r.instance is instance]
        text = f"instance {instance.instance_id} {why}; {len(owned)} requests move"
        self._outbox.log("info" if cause == "left" else "warning", text)
        self._advancing.decide(now, self._policy.left(now, instance))
        for request in owned:
            self._placing.displace(now, request, cause)
        self._placing.stir()

    def _compare(self, now: float, instance: Instance, applied: int, holds: list[Held]) -> None:
        held = {h.request_id: h for h in holds}
        quiet_s = max(
            self._settings.resend_after_s, self._settings.n_patient_steps * instance.step_s
        )
        for request in list(instance.requests.values()):
            if request.instance is instance and request.placed:
                self._check(now, request, held.get(request.request_id), applied, quiet_s)
                if not holds:
                    self._judge(now, request, instance)
        for h in holds:
            request_or_none = self._placing.requests.get(h.request_id)
            if request_or_none is None or request_or_none.instance is not instance:
                self._check_foreign(now, instance, h, request_or_none)

    def _check(
        self, now: float, request: Request, held: Held | None, applied: int, quiet_s: float
    ) -> None:
        """A request that the instance owns."""
        if held is not None and held.epoch >= request.epoch:
            if held.epoch > request.epoch:
                self._placing.fence(now, request, stored_epoch=request.epoch, above=held.epoch)
                return
            request.confirmed = True
        if now - max(request.progress_at, request.sent_at, request.nudged_at) >= quiet_s:
            ahead = held is not None and held.step > request.step
            self._nudge(now, request, held.step if held and ahead else None)
        elif applied < request.sent_seq and now - request.sent_at >= self._settings.resend_after_s:
            self._outbox.credit(request)

    def _judge(self, now: float, request: Request, instance: Instance) -> None:
        """The owner of a request holds nothing: is it deaf? One that computes holds something."""
        unheeded = request.n_unheeded >= self._settings.n_unheeded
        if request.placed and not request.confirmed and unheeded:
            self._placing.give_up_on(now, request, instance)

    def _nudge(self, now: float, request: Request, held_step: int | None) -> None:
        """No news for too long. The command may be lost, or the result, or both; where the owner
        is ahead (`held_step`), the result, or the store's last writes."""
        request.nudged_at = now
        request.n_nudges += 1
        first = request.n_nudges % 2 == 1
        if first == (held_step is not None):
            self._outbox.load([request])
            return
        if held_step is not None:
            credit.unlock(request, held_step, self._settings.run_ahead)
        self._outbox.credit(request)

    def _check_foreign(
        self, now: float, instance: Instance, held: Held, request: Request | None
    ) -> None:
        """A request that the instance holds and does not own."""
        if request is None:
            self._outbox.release(instance, held.request_id, held.epoch)
        elif request.state in ("running", "parked"):
            self._outbox.release(instance, held.request_id, held.epoch)
            if held.epoch >= request.epoch:
                self._placing.fence(now, request, stored_epoch=request.epoch, above=held.epoch)


def _kind(instance: Instance) -> str:
    info = instance.info
    assert info is not None
    return (
        f"weights {info.weights_hash[:12]}, cache {info.cache_mode}, blocks of {info.block_length}"
    )
