"""Whether a better mix is worth the change: how much better, and not back at once.

Knows no clock, no solver and no running instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilaserve_reconfigurator.record import Mix, Verdict, mix_text

__all__ = ["Change", "Costs", "Judgement", "decide", "gain"]

SAME = 0.01
"""Thresholds that are nearer than this share are equal: the solver stops at such a gap."""


@dataclass(frozen=True, slots=True)
class Change:
    """The last change that was made."""

    at_s: float
    before: Mapping[int, int]
    payback_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a change costs and what it has to bring."""

    launch_s: float = 60.0
    """From the command to the first step of a new instance; its GPUs do nothing meanwhile."""
    min_gain: float = 0.1


@dataclass(frozen=True, slots=True)
class Judgement:
    """What to do, and why."""

    verdict: Verdict
    reasons: list[str]
    payback_s: float | None = None


def decide(
    now: float, present: Mix, best: Mix, costs: Costs, last: Change | None = None
) -> Judgement:
    """Judge `best` against `present`. A mix without a mean threshold cannot serve the load."""
    was, will_be = _quality(present), _quality(best)
    if best.counts == present.counts:
        return Judgement("keep", [_why_kept(present, best)])
    if was is None:
        return Judgement("change", [_why_not(present, best)])
    if will_be is None:
        return Judgement("keep", ["nothing better was found"])
    value, reason = _improvement(was, will_be, costs)
    if value < costs.min_gain or value <= 0.0:
        return Judgement(
            "keep",
            [
                reason,
                f"less than {costs.min_gain:.0%} is not worth a change"
                if value > 0.0
                else "which is no gain",
            ],
        )
    payback_s = _payback_s(present.counts, best.counts, value, costs)
    if last is not None and now < last.at_s + last.payback_s and _goes_back(present, best, last):
        left_s = last.at_s + last.payback_s - now
        return Judgement(
            "keep",
            [reason, f"it undoes a change that takes another {left_s:.0f} s to pay back"],
            payback_s,
        )
    return Judgement("change", [reason], payback_s)


def gain(new: float, old: float) -> float:
    """How much more `new` is, as a share of the size of `old`: from -2 to -1.8 it is 10 %. From
    nothing, anything is infinitely more."""
    if old == 0.0:
        return 0.0 if new == 0.0 else float("inf") if new > 0 else float("-inf")
    return (new - old) / abs(old)


def _quality(mix: Mix) -> tuple[float, float] | None:
    """Mean threshold, and the share of its SLO that the mean request takes."""
    if mix.mean_threshold is None or mix.mean_slack is None:
        return None
    return mix.mean_threshold, 1.0 - mix.mean_slack


def _improvement(
    was: tuple[float, float], will_be: tuple[float, float], costs: Costs
) -> tuple[float, str]:
    """By how much, and in words. Thresholds first; where they are equal, the share of the SLO that
    requests take: a tenth less of it counts the same however loose the SLO is."""
    higher = gain(will_be[0], was[0])
    if higher < -SAME or higher >= max(costs.min_gain, SAME):
        return higher, f"mean threshold {will_be[0]:.3f} instead of {was[0]:.3f} ({higher:+.1%})"
    sooner = gain(-will_be[1], -was[1])
    return sooner, (
        f"a mean request takes {will_be[1]:.1%} of its SLO instead of {was[1]:.1%} ({sooner:+.1%} "
        f"better), at a threshold of {will_be[0]:.3f} instead of {was[0]:.3f}"
    )


def _why_kept(present: Mix, best: Mix) -> str:
    if best.mean_threshold is None:
        kept = mix_text(present.counts)
        return f"no mix can serve this load within its SLOs; {kept} is kept, which serves the most"
    return f"{mix_text(present.counts)} is the best there is"


def _why_not(present: Mix, best: Mix) -> str:
    unable = f"{mix_text(present.counts)} cannot serve this load within its SLOs"
    if best.mean_threshold is None:
        return f"{unable}, nor can any other mix: {mix_text(best.counts)} serves the most"
    return f"{unable}; {mix_text(best.counts)} can"


def _payback_s(
    present: Mapping[int, int], best: Mapping[int, int], value: float, costs: Costs
) -> float:
    """GPU-seconds that launches cost, over those that the gain brings in a second."""
    launched = sum(d * max(n - present.get(d, 0), 0) for d, n in best.items())
    n_gpus = sum(d * n for d, n in best.items())
    return costs.launch_s * launched / (min(value, 1.0) * max(n_gpus, 1))


def _goes_back(present: Mix, best: Mix, last: Change) -> bool:
    """Whether the best mix is nearer to the one before the last change than the present one is."""
    return _distance(best.counts, last.before) < _distance(present.counts, last.before)


def _distance(a: Mapping[int, int], b: Mapping[int, int]) -> int:
    """GPUs whose instances differ."""
    return sum(d * abs(a.get(d, 0) - b.get(d, 0)) for d in {*a, *b})
