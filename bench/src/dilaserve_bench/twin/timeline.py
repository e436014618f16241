"""Virtual time: what happens next happens now. Knows nothing of what happens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

__all__ = ["Timeline"]

EVENTS_PER_LOOK = 1024


class Timeline:
    """A clock that stands still while something happens, and then jumps to what comes next.

    Things at the same time happen in the order in which they were planned, so that a run depends
    on nothing but its inputs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self._is_stopped = False
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

    def run(self, *, horizon_s: float, interrupted: Callable[[], bool]) -> None:
        """Let time pass until `stop` is called, nothing is left to happen, or it would be later
        than `horizon_s`. Now and then it is asked whether to break off."""
        queue, pop = self._queue, heapq.heappop
        self._is_stopped = False
        while queue and queue[0][0] <= horizon_s and not self._is_stopped:
            self.now, _, action, argument = pop(queue)
            action(argument)
            self.n_events += 1
            if not self.n_events % EVENTS_PER_LOOK and interrupted():
                return

    def stop(self) -> None:
        """Let nothing happen after what happens now."""
        self._is_stopped = True
