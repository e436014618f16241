"""INFaaS as the paper adapts it (section 5.1): least loaded by tokens, fixed threshold, FCFS.

Load is the sum of full lengths (prompt + output); a request goes to the instance with the least,
within its token and KV budget, and stays there. Knows no SLO.
"""

from __future__ import annotations

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Overload, Policy
from dilaserve_scheduler.policies.backlog import Backlog
from dilaserve_scheduler.policies.least_loaded import LeastLoaded
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pace import Pace

__all__ = ["Infaas"]


class Infaas(Policy):
    """The first baseline, and what runs while nothing is known of a model's steps."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._instances = LeastLoaded()
        self._pace = Pace()
        self._backlog = Backlog(self._instances, self._pace, options.queue_limit)

    def place(self, now: float, request: Request) -> Instance | None:
        """The least loaded instance with room."""
        return self._instances.first_with_room(request)

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """Fixed, but not below the request's quality floor."""
        return max(self._options.threshold, request.min_confidence or 0.0)

    def predict_finish_s(self, now: float, request: Request) -> float:
        """What is left of it at the recent pace, after those that wait before it."""
        instance = request.instance or request.target
        if instance is not None:
            return self._pace.time_left_s(request, instance.step_s)
        return self._backlog.drain_s(now, request) + self._backlog.time_left_s(request)

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Too many wait already."""
        return self._backlog.refuse(now, request)

    def parked(self, now: float, request: Request) -> None:
        """Count it."""
        self._backlog.parked(request)

    def unparked(self, now: float, request: Request) -> None:
        """Count it no more."""
        self._backlog.unparked(request)

    def joined(self, now: float, instance: Instance) -> tuple[()]:
        """Take it into the choice."""
        self._instances.add(instance)
        return ()

    def left(self, now: float, instance: Instance) -> tuple[()]:
        """Take it out of the choice."""
        self._instances.remove(instance)
        return ()

    def load_changed(self, now: float, instance: Instance) -> None:
        """Sort it in anew."""
        self._instances.update(instance)

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """Learn the pace."""
        if finished:
            self._pace.finished(now, request)
