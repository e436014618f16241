"""Sees to it that one planner at a time owns the workers of a folder, and that one that was stopped
for a while and goes on does not take that while for time that it watched.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dilaserve_reconfigurator.snapshot import PlanningError

__all__ = ["LONGEST_LOOK_S", "AwakeClock", "only_planner"]

LONGEST_LOOK_S = 1.0
"""Whoever waits by an AwakeClock asks it at least so often."""
ASLEEP_S = 5.0
"""Not asked for longer than this, the process was stopped, or starved."""


@contextmanager
def only_planner(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system takes back when the process dies, and only then:
    one that is stopped keeps it, so nobody else acts until it is killed. Raises PlanningError where
    another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "planner.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise PlanningError(
                f"another planner, process {lock.read().strip() or '?'}, owns the workers of "
                f"{folder}; end it (by SIGKILL if it hangs), or give this one another "
                "DILASERVE_INSTANCES_DIR"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


class AwakeClock:
    """Seconds of `clock` during which this process ran."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_s = clock()
        self._now_s = 0.0

    def __call__(self) -> float:
        """Seconds since it was made, less those in which the process was stopped."""
        before_s, self._read_s = self._read_s, self._clock()
        self._now_s += min(self._read_s - before_s, ASLEEP_S)
        return self._now_s
