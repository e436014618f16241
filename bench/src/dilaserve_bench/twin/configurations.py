"""What a run says of its planner: which instances there were when, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Configuration", "PlanNote", "mix_at"]


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """What there is from a moment on."""

    at_s: float
    serving: dict[int, int]
    """Instances by TP degree that take requests."""
    n_taken: int
    """GPUs, with those of instances that start or end."""


class PlanNote(msgspec.Struct, frozen=True, kw_only=True):
    """One plan; `dilaserve plan` says more of one."""

    at_s: float
    verdict: str
    """change, keep or hold."""
    reason: str
    rate: float
    """Arrivals a second that it was made for."""
    present: dict[int, int]
    target: dict[int, int]
    """Equal to `present` where nothing is to change."""


def mix_at(course: Sequence[Configuration], at_s: float) -> dict[int, int]:
    """Instances that served at a time, by TP degree."""
    before = [each.serving for each in course if each.at_s <= at_s]
    return before[-1] if before else {}
