"""What goes wrong, and when: instances that die or leave, a scheduler that stands still or dies."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from dilaserve.errors import DiLaServeError

__all__ = ["Fault", "parse_fault"]

Action = Literal["kill", "leave", "pause", "restart"]

_NUMBER = r"(\d+(?:\.\d+)?)"
_INSTANCE = re.compile(rf"t={_NUMBER}:(kill|leave)=(\d+)(?::for={_NUMBER})?")
_SCHEDULER = re.compile(rf"t={_NUMBER}:(pause|restart)={_NUMBER}")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """kill, leave: an instance, away for `for_s`, or for good (None).
    pause, restart: the scheduler stands still, or dies with its memory, for `for_s`."""

    at_s: float
    action: Action
    instance: int = 0
    for_s: float | None = None


def parse_fault(text: str, n_instances: int) -> Fault:
    """Such as t=10:kill=0, t=10:kill=0:for=5, t=20:pause=1.5. Raises DiLaServeError."""
    if match := _INSTANCE.fullmatch(text):
        at_s, action, instance, for_s = match.groups()
        if int(instance) < n_instances:
            away_s = None if for_s is None else float(for_s)
            return _fault(at_s, action, instance=int(instance), for_s=away_s)
    elif match := _SCHEDULER.fullmatch(text):
        at_s, action, for_s = match.groups()
        return _fault(at_s, action, for_s=float(for_s))
    raise DiLaServeError(
        f"fault {text!r} is unknown; there are {n_instances} instances, counted from 0; write for "
        "example t=10:kill=0, t=10:kill=0:for=5, t=10:leave=3, t=20:pause=1.5 or t=20:restart=2"
    )


def _fault(at_s: str, action: str, *, instance: int = 0, for_s: float | None = None) -> Fault:
    values = {"at_s": float(at_s), "action": action, "instance": instance, "for_s": for_s}
    return msgspec.convert(values, Fault)
