"""The scheduler's core: events in, effects out. Composes small parts and routes to them.

Sans-IO: no clock, no bus, no store. The service and the digital twin drive this same object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dilaserve.messages import (
    Cancel,
    Heartbeat,
    InstanceDown,
    InstanceStatus,
    InstanceUp,
    RequestStatus,
    Status,
    StepResult,
    Submit,
)
from dilaserve.plan_messages import Drain
from dilaserve_scheduler.core.admission import Admission
from dilaserve_scheduler.core.advancing import Advancing
from dilaserve_scheduler.core.draining import Draining
from dilaserve_scheduler.core.effects import Effect
from dilaserve_scheduler.core.events import (
    ActiveListed,
    AdmitAnswered,
    Event,
    FailAnswered,
    Loaded,
    ReassignAnswered,
    Recovered,
    StoreRestarted,
    TermRaised,
    Told,
)
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.core.recovery import Recovery
from dilaserve_scheduler.core.settings import CoreSettings
from dilaserve_scheduler.core.watching import Watching

__all__ = ["Core"]


class Core:
    """Decides for one cluster, under one term at a time.

    `now` is monotonic seconds and must not go back. Events may come in any order, twice, late or
    never, but for the answers to store calls: those come, once each, however late. Policy objects
    are not shared between cores.
    """

    def __init__(
        self, policy: Policy, settings: CoreSettings | None = None, *, term: int = 1
    ) -> None:
        settings = settings or CoreSettings()
        self._policy = policy
        self._outbox = outbox = Outbox(term)
        self._members = members = Members(dead_after_s=settings.dead_after_s, gap_s=settings.gap_s)
        self._placing = placing = Placing(policy, members, outbox, settings)
        self._advancing = Advancing(policy, members, placing, outbox, settings.run_ahead)
        self._watching = Watching(policy, members, placing, self._advancing, outbox, settings)
        self._admission = Admission(policy, members, placing, outbox, settings)
        self._recovery = Recovery(members, placing, self._advancing, outbox, settings)
        self._draining = Draining(policy, members, placing, self._advancing, outbox)
        self._sleepers = (self._admission, policy, placing.patience, self._draining)
        self._opened = False
        self._routes: dict[type, Callable[[float, Any], None]] = {
            Submit: self._admission.on_submit,
            Cancel: self._admission.on_cancel,
            StepResult: self._advancing.on_result,
            Heartbeat: self._watching.on_heartbeat,
            InstanceUp: self._watching.on_up,
            InstanceDown: self._watching.on_down,
            Drain: self._draining.on_drain,
            AdmitAnswered: placing.on_admit,
            ReassignAnswered: placing.on_reassign,
            FailAnswered: placing.on_fail,
            Loaded: self._recovery.on_loaded,
            ActiveListed: self._recovery.on_listed,
            Recovered: self._recovery.on_recovered,
            StoreRestarted: self._recovery.on_restarted,
            TermRaised: self._recovery.on_term,
            Told: self._on_told,
        }

    def handle(self, now: float, event: Event) -> list[Effect]:
        """What follows from one event. Raises LifecycleError only for a bug of ours."""
        self._open(now)
        self._routes[type(event)](now, event)
        return self._finish(now)

    def wake_at(self) -> float | None:
        """When to call `tick`, if no event comes before."""
        earliest = self._recovery.wake_at()
        for part in self._sleepers:
            at = part.wake_at()
            if at is not None and (earliest is None or at < earliest):
                earliest = at
        return earliest

    def tick(self, now: float) -> list[Effect]:
        """What is due by now; calling it too early or too often does no harm."""
        self._open(now)
        self._recovery.tick(now)
        self._draining.tick(now)
        due = self._policy.wake_at()
        if due is not None and due <= now:
            self._advancing.decide(now, self._policy.tick(now))
        return self._finish(now)

    @property
    def term(self) -> int:
        """The term of all commands and store calls."""
        return self._outbox.term

    @property
    def n_waiting(self) -> int:
        """Admitted requests that wait for room."""
        return len(self._placing.line)

    def n_waiting_by_model(self) -> dict[str, int]:
        """The same by model, for all models that were ever served."""
        models = {instance.model_id: 0 for instance in self._members if instance.model_id}
        return models | self._placing.line.n_by_model

    def is_live(self, now: float, instance: Instance) -> bool:
        """Whether it was heard lately; an instance whose silence proves nothing is not."""
        return instance.state == "live" and not self._members.is_silent(instance, now)

    def state_of(self, now: float, instance: Instance) -> Literal["live", "draining", "dead"]:
        """As people are told; one that drains is live as well."""
        if not self.is_live(now, instance):
            return "dead"
        return "draining" if instance.is_draining else "live"

    def requests(self) -> list[Request]:
        """All requests that have not ended; to be read only."""
        return list(self._placing.requests.values())

    def instances(self) -> list[Instance]:
        """All instances, the dead ones of the last minute included; to be read only."""
        return list(self._members)

    def status(self, now: float) -> Status:
        """What is known, for people."""
        return Status(
            term=self.term,
            instances=[
                InstanceStatus(
                    info=instance.info,
                    state=self.state_of(now, instance),
                    n_requests=len(instance.requests),
                    n_tokens=instance.n_tokens,
                    heartbeat_age_s=now - instance.heard_at,
                )
                for instance in self._members
                if instance.info is not None
            ],
            requests=[_request_status(r) for r in self._placing.requests.values()],
        )

    def _open(self, now: float) -> None:
        if not self._opened:
            self._opened = True
            self._admission.open(now)
            self._recovery.open(now)

    def _finish(self, now: float) -> list[Effect]:
        self._watching.bury_dead(now)
        self._admission.reconsider(now)
        self._placing.place_waiting(now)
        self._placing.give_up_waiting(now)
        return self._outbox.take(now)

    def _on_told(self, now: float, event: Told) -> None:
        self._advancing.decide(now, self._policy.told(now, event.answer))


def _request_status(request: Request) -> RequestStatus:
    instance = request.instance or request.target
    return RequestStatus(
        request_id=request.request_id,
        state=request.state,
        instance_id=instance.instance_id if instance is not None else None,
        epoch=request.epoch,
        step=request.step,
        n_unmasked=request.n_unmasked,
        n_output=request.n_output,
        threshold=request.threshold,
    )
