"""Virtual time: what happens next happens now. Knows nothing of what happens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

__all__ = ["Timeline"]


class Timeline:
    """A clock that stands still while something happens, and then jumps to what comes next.

    Things at the same time happen in the order in which they were planned, so that a run depends
    on nothing but its inputs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Have `action(argument)` happen at a time that is not in the past."""
        if time_s < self.now:
            raise ValueError(f"{time_s} s lies before now, {self.now} s")
        heapq.heappush(self._queue, (time_s, next(self._numbers), action, argument))

    def after(self, delay_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Have `action(argument)` happen `delay_s` from now."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), action, argument))

    def run(self, until: Callable[[], bool], *, horizon_s: float) -> None:
        """Let time pass until `until()` holds after something has happened, nothing is left to
        happen, or it would be later than `horizon_s`."""
        queue = self._queue
        while queue and queue[0][0] <= horizon_s:
            self.now, _, action, argument = heapq.heappop(queue)
            self.n_events += 1
            action(argument)
            if until():
                return
