"""The planner's messages, as in `messages`: what it proposes and has done, and how it empties an
instance."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dilaserve.messages import Count, Message, Word

__all__ = [
    "Drain",
    "Drained",
    "FromPlanner",
    "NotDrained",
    "PlanApplied",
    "PlanProposed",
    "PlannedMix",
    "decode_drain",
    "decode_drained",
    "decode_plan",
]

Hold = Annotated[float, Meta(gt=0.0, le=600.0)]


class PlannedMix(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instances by TP degree, and what they are predicted to do; None: they cannot serve it."""

    counts: dict[str, Count]
    mean_threshold: float | None = None
    mean_slack: float | None = None
    """Share of its SLO that the mean request has left at its end."""
    mean_latency_s: float | None = None


class PlanProposed(Message, frozen=True, tag="plan_proposed"):
    """What the planner would do, and why; `dilaserve plan explain` has the rest."""

    plan_id: Word
    verdict: str
    """change, keep or hold."""
    reasons: list[str]
    present: PlannedMix
    target: PlannedMix


class PlanApplied(Message, frozen=True, tag="plan_applied"):
    """A plan was carried out, or not (`reason`); `counts` is what runs now."""

    plan_id: Word
    counts: dict[str, Count]
    reason: str = ""
    seconds: float = 0.0
    """From its beginning to its end."""
    lowest_gpus: Count = 0
    """Fewest GPUs that served on the way."""
    pause_s: float = 0.0
    """Seconds in which fewer served than the floor wants, or none, so that requests waited."""


class Drain(Message, frozen=True, tag="drain"):
    """Planner → scheduler: give this instance nothing more, and let its requests move at their
    next recompute step; or, with `resume`, take that back.

    It holds for `hold_s` and is repeated for longer, also after the instance has gone, until its
    successor serves: so long the model counts as served, and requests wait. So it outlives a
    scheduler, and ends by itself if its sender dies."""

    instance_id: Word
    resume: bool = False
    hold_s: Hold = 10.0


class Drained(Message, frozen=True, tag="drained"):
    """The answer, at once: how many requests the instance still holds; ask again until it is 0."""

    instance_id: Word
    n_left: Count = 0


class NotDrained(Message, frozen=True, tag="not_drained"):
    """The answer where nothing was done, and what to do about it."""

    instance_id: str
    reason: str


FromPlanner = PlanProposed | PlanApplied

decode_plan = msgspec.json.Decoder(FromPlanner).decode
decode_drain = msgspec.json.Decoder(Drain).decode
decode_drained = msgspec.json.Decoder(Drained | NotDrained).decode
