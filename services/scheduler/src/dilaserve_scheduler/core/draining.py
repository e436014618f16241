"""Instances that are to get empty, because others will take their GPUs.

Soft state: whoever wants an instance empty says so again and again. So a new scheduler learns of it
from the next word, and an instance whose emptying nobody asks for any more takes requests again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilaserve.plan_messages import Drain, Drained, NotDrained
from dilaserve_scheduler.core.advancing import Advancing
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Instance
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.policy import Policy

__all__ = ["Draining"]


@dataclass(frozen=True, slots=True)
class _Hold:
    until: float
    model_id: str


class Draining:
    """Takes instances out of the policy's choice, and back. That requests leave is `Advancing`'s:
    at the end of a block, where the next step is a recompute step anyway, to whom the policy
    chooses; where nobody has room they stay."""

    def __init__(
        self,
        policy: Policy,
        members: Members,
        placing: Placing,
        advancing: Advancing,
        outbox: Outbox,
    ) -> None:
        self._policy = policy
        self._members = members
        self._placing = placing
        self._advancing = advancing
        self._outbox = outbox
        self._holds: dict[str, _Hold] = {}

    def on_drain(self, now: float, event: Drain) -> None:
        """For the first time or again; also of one that has left, whose successor is launched."""
        instance = self._members.get(event.instance_id)
        if instance is None and not self._members.has_departed(event.instance_id):
            self._outbox.answer_drain(_unknown(event.instance_id))
            return
        if event.resume:
            self._resume(now, event.instance_id, "takes requests again")
        else:
            self._hold(now, event, instance)
        n_left = len(instance.requests) if instance is not None else 0
        self._outbox.answer_drain(Drained(instance_id=event.instance_id, n_left=n_left))

    def wake_at(self) -> float | None:
        """When the first word is to be repeated at the latest."""
        return min((hold.until for hold in self._holds.values()), default=None)

    def tick(self, now: float) -> None:
        """Words that nobody has repeated are void."""
        for instance_id, hold in list(self._holds.items()):
            if hold.until <= now:
                why = "takes requests again, since nobody asks for its emptying any more"
                self._resume(now, instance_id, why)
        self._members.forget_promises(now)

    def _hold(self, now: float, event: Drain, instance: Instance | None) -> None:
        earlier = self._holds.get(event.instance_id)
        model_id = instance.model_id if instance is not None else ""
        model_id = model_id or (earlier.model_id if earlier is not None else "")
        until = now + event.hold_s
        self._holds[event.instance_id] = _Hold(until, model_id)
        if model_id:
            self._members.promise(model_id, until)
        if instance is not None and not instance.is_draining:
            self._begin(now, instance)

    def _begin(self, now: float, instance: Instance) -> None:
        instance.is_draining = True
        n_requests = len(instance.requests)
        text = f"instance {instance.instance_id} is to get empty; it has {n_requests} requests"
        self._outbox.log("info", text)
        if instance.state == "live":  # the policy knows no others
            self._advancing.decide(now, self._policy.left(now, instance))
        for request in list(instance.requests.values()):
            self._advancing.go_on(now, request)

    def _resume(self, now: float, instance_id: str, why: str) -> None:
        self._holds.pop(instance_id, None)
        instance = self._members.get(instance_id)
        if instance is None or not instance.is_draining:
            return
        instance.is_draining = False
        self._outbox.log("info", f"instance {instance_id} {why}")
        if instance.state == "live":
            self._advancing.decide(now, self._policy.joined(now, instance))
            self._placing.stir()


def _unknown(instance_id: str) -> NotDrained:
    reason = (
        "no such instance has been heard; see `dilaserve status` for those that are, or ask again "
        "in a second if the scheduler has just started"
    )
    return NotDrained(instance_id=instance_id, reason=reason)
