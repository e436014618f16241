"""The planner's messages, as in `messages`: what it proposes and has done, and how it empties an
instance."""

from __future__ import annotations

import msgspec

from dilaserve.messages import Count, Message, Word

__all__ = [
    "Drain",
    "Drained",
    "FromPlanner",
    "PlanApplied",
    "PlanProposed",
    "PlannedMix",
    "decode_plan",
]


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
    """A plan was carried out, or given up on the way (`reason`); `counts` is what runs now."""

    plan_id: Word
    counts: dict[str, Count]
    reason: str = ""


class Drain(Message, frozen=True, tag="drain"):
    """Planner → scheduler: empty this instance and give it nothing more; or, with `resume`, take
    that back."""

    instance_id: Word
    resume: bool = False


class Drained(Message, frozen=True, tag="drained"):
    """The answer, once it holds nothing, or at once to `resume`."""

    instance_id: Word


FromPlanner = PlanProposed | PlanApplied

decode_plan = msgspec.json.Decoder(FromPlanner).decode
