"""Those who wait for room: how many, how long until they have it, and when it is too many."""

from __future__ import annotations

from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.policy import Overload
from dilaserve_scheduler.policies.least_loaded import LeastLoaded
from dilaserve_scheduler.policies.pace import Pace

__all__ = ["Backlog"]

MAX_RETRY_AFTER_S = 600.0


class Backlog:
    """Counts, and judges by the pace of the cluster."""

    def __init__(self, instances: LeastLoaded, pace: Pace, limit: int) -> None:
        self.n_waiting = 0
        self._n_tokens = 0
        self._instances = instances
        self._pace = pace
        self._limit = limit

    def parked(self, request: Request) -> None:
        """It waits."""
        self.n_waiting += 1
        self._n_tokens += request.n_tokens

    def unparked(self, request: Request) -> None:
        """It waits no more."""
        self.n_waiting -= 1
        self._n_tokens -= request.n_tokens

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Too many wait already. Retry-After: when those have drained at the recent pace."""
        if self.n_waiting < self._limit:
            return None
        retry_after_s = min(max(self.drain_s(now, request), 1.0), MAX_RETRY_AFTER_S)
        reason = (
            f"{self.n_waiting} requests wait already (DILASERVE_QUEUE_LIMIT); "
            f"try again in {retry_after_s:.0f} s"
        )
        return Overload(reason, retry_after_s)

    def drain_s(self, now: float, request: Request) -> float:
        """Until all that wait have got room: at the measured rate or, before there is one, in
        waves that fill the whole cluster."""
        drain_s = self._pace.drain_s(now, self._n_tokens)
        if drain_s is not None:
            return drain_s
        waves = self._n_tokens / max(self._instances.total_budget(request.model_id), 1)
        return waves * self.time_left_s(request)

    def time_left_s(self, request: Request) -> float:
        """Seconds from its placement to its last token, at the recent pace."""
        first = self._instances.first(request.model_id)
        return self._pace.time_left_s(request, first.step_s if first is not None else 0.0)
