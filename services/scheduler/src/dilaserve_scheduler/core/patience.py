"""How long a request may wait for an instance before it fails. Knows no instances."""

from __future__ import annotations

import math
from collections import deque

from dilaserve_scheduler.core.model import Request

__all__ = ["Patience"]


class Patience:
    """Watches those who wait. All have the same time, so the first to come is the first to go."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` may be infinite."""
        self.timeout_s = timeout_s
        self._watched: deque[tuple[float, Request]] = deque()

    def watch(self, now: float, request: Request) -> None:
        """The request waits from now on."""
        request.parked_at = now
        if not math.isinf(self.timeout_s):
            self._watched.append((now, request))

    def wake_at(self) -> float | None:
        """When the first of those who wait has waited for long enough."""
        watched = self._watched
        while watched and not _still_waits(*watched[0]):
            watched.popleft()
        return watched[0][0] + self.timeout_s if watched else None

    def take_due(self, now: float) -> list[Request]:
        """Those who have waited for too long, once each."""
        due = []
        while self._watched and self._watched[0][0] + self.timeout_s <= now:
            since, request = self._watched.popleft()
            if _still_waits(since, request):
                due.append(request)
        return due

    def explain(self, request: Request, *, is_runnable: bool) -> str:
        """What the client is told. `is_runnable`: a live instance could run it, if it had room."""
        if is_runnable:
            why = "all that can run it were busy; send it again later, or start more"
        elif request.weights_hash:
            why = (
                f"none that lives has the weights that it was begun with "
                f"({request.weights_hash[:12]}) and takes {request.n_tokens} tokens; send it again"
            )
        else:
            why = f"none that lives takes its {request.n_tokens} tokens; start one that does"
        return f"no instance took the request within {self.timeout_s:g} s: {why}"


def _still_waits(since: float, request: Request) -> bool:
    return request.state == "parked" and request.parked_at == since
