"""INFaaS as the paper adapts it (section 5.1): least loaded by tokens, fixed threshold, FCFS.

Load is the sum of full lengths (prompt + output); a request goes to the instance with the least,
within its token and KV budget, and stays there. Knows no SLO.
"""

from __future__ import annotations

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Overload, Policy
from dilaserve_scheduler.policies.least_loaded import LeastLoaded
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pace import Pace

__all__ = ["Infaas"]

MAX_RETRY_AFTER_S = 600.0


class Infaas(Policy):
    """The first baseline, and what runs while nothing is known of a model's steps."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._instances = LeastLoaded()
        self._pace = Pace()
        self._n_waiting = 0
        self._n_waiting_tokens = 0

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
        return self._drain_s(now, request) + self._time_left_s(request)

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Too many wait already. Retry-After: when those have drained at the recent pace."""
        if self._n_waiting < self._options.queue_limit:
            return None
        retry_after_s = min(max(self._drain_s(now, request), 1.0), MAX_RETRY_AFTER_S)
        reason = (
            f"{self._n_waiting} requests wait already (DILASERVE_QUEUE_LIMIT); "
            f"try again in {retry_after_s:.0f} s"
        )
        return Overload(reason, retry_after_s)

    def parked(self, now: float, request: Request) -> None:
        """Count it."""
        self._n_waiting += 1
        self._n_waiting_tokens += request.n_tokens

    def unparked(self, now: float, request: Request) -> None:
        """Count it no more."""
        self._n_waiting -= 1
        self._n_waiting_tokens -= request.n_tokens

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

    def _drain_s(self, now: float, request: Request) -> float:
        """Until all that wait have got room: at the measured rate or, before there is one, in
        waves that fill the whole cluster."""
        drain_s = self._pace.drain_s(now, self._n_waiting_tokens)
        if drain_s is not None:
            return drain_s
        waves = self._n_waiting_tokens / max(self._instances.total_budget(request.model_id), 1)
        return waves * self._time_left_s(request)

    def _time_left_s(self, request: Request) -> float:
        first = self._instances.first(request.model_id)
        return self._pace.time_left_s(request, first.step_s if first is not None else 0.0)
