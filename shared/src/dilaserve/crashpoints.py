"""Named places at which a process kills itself, so that fault tests hit the moment they mean."""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

from dilaserve.errors import SettingsError

CrashPoint = Literal[
    "worker.command_in_flight",
    "worker.before_forward",
    "worker.after_forward",
    "worker.after_commit",
    "scheduler.after_admit",
    "scheduler.after_reassign",
    "reconfigurator.wanted",
    "reconfigurator.draining",
    "reconfigurator.stopping",
    "reconfigurator.stopped",
    "reconfigurator.launching",
    "reconfigurator.launched",
    "reconfigurator.undoing",
    "reconfigurator.given_up",
    "reconfigurator.done",
]


class CrashPoints:
    """At most one armed point. `armed` is "" (none) or "name:n": die when `name` is reached the
    n-th time. Raises SettingsError for an unknown name or a count below 1. `also`: a process that
    is to die with this one.
    """

    def __init__(self, armed: str = "", *, also: int | None = None) -> None:
        name, _, count = armed.partition(":")
        self._name = name
        self._left = _parse(armed, name, count) if armed else 0
        self._also = also

    def reach(self, name: CrashPoint) -> None:
        """Die by SIGKILL, with nothing flushed, if this point is armed and its count is reached."""
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            if self._also is not None:
                os.kill(self._also, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _parse(armed: str, name: str, count: str) -> int:
    if name in get_args(CrashPoint) and (count or "1").isdecimal() and int(count or "1") > 0:
        return int(count or "1")
    points = ", ".join(get_args(CrashPoint))
    raise SettingsError(
        f"DILASERVE_CRASH_AT={armed!r} is not 'point:count'; points are {points}; "
        "use for example worker.after_commit:3"
    )
