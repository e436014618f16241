"""A policy for each model: steps, prices, load and queues of one say nothing of another's.

Knows no policy. Instances serve one model, so that nothing is shared but the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dilaserve.messages import StepResult, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Decision, Overload, Policy

__all__ = ["PerModel"]


class PerModel(Policy):
    """Passes each call on to the policy of its model, which is built when it is first heard of."""

    def __init__(self, build: Callable[[], Policy]) -> None:
        self.policies: dict[str, Policy] = {}
        """By model id."""
        self._build = build

    def place(self, now: float, request: Request) -> Instance | None:
        """See Policy."""
        return self._of(request).place(now, request)

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """See Policy."""
        return self._of(request).threshold(now, request, instance)

    def predict_finish_s(self, now: float, request: Request) -> float:
        """See Policy."""
        return self._of(request).predict_finish_s(now, request)

    def refuse(self, now: float, request: Request) -> Overload | None:
        """See Policy."""
        return self._of(request).refuse(now, request)

    def rank(self, request: Request) -> tuple[float, ...]:
        """See Policy."""
        return self._of(request).rank(request)

    def parked(self, now: float, request: Request) -> None:
        """See Policy."""
        self._of(request).parked(now, request)

    def unparked(self, now: float, request: Request) -> None:
        """See Policy."""
        self._of(request).unparked(now, request)

    def joined(self, now: float, instance: Instance) -> Iterable[Decision]:
        """See Policy."""
        return self._of(instance).joined(now, instance)

    def left(self, now: float, instance: Instance) -> Iterable[Decision]:
        """See Policy."""
        return self._of(instance).left(now, instance)

    def load_changed(self, now: float, instance: Instance) -> None:
        """See Policy."""
        self._of(instance).load_changed(now, instance)

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        """See Policy."""
        return self._of(instance).stepped(now, instance, result, requests)

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """See Policy."""
        return self._of(request).block_ending(now, request)

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """See Policy."""
        self._of(request).ended(now, request, finished=finished)

    def told(self, now: float, answer: object) -> Iterable[Decision]:
        """Predictions are one model's; anything else is for all."""
        if isinstance(answer, StepsPredicted):
            policy = self.policies.get(answer.model_id)
            return policy.told(now, answer) if policy is not None else ()
        return [d for policy in self.policies.values() for d in policy.told(now, answer)]

    def wake_at(self) -> float | None:
        """See Policy."""
        earliest = None
        for policy in self.policies.values():
            at = policy.wake_at()
            if at is not None and (earliest is None or at < earliest):
                earliest = at
        return earliest

    def tick(self, now: float) -> Iterable[Decision]:
        """Those whose time has come."""
        decisions: list[Decision] = []
        for policy in self.policies.values():
            at = policy.wake_at()
            if at is not None and at <= now:
                decisions += policy.tick(now)
        return decisions

    def _of(self, one: Request | Instance) -> Policy:
        policy = self.policies.get(one.model_id)
        if policy is None:
            policy = self.policies[one.model_id] = self._build()
        return policy
