"""Load control of `dilaserve`: the highest common level of thresholds that the cluster can afford.

Pure functions over arrays. Seconds of work are instance-seconds of the reference degree. A level is
a number of the candidates' scale: 2.3 lets three requests of ten use candidate 3, the others 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dilaserve_scheduler.policies.ledger import Floats

__all__ = ["Forecast", "Queue", "highest_level"]


@dataclass(frozen=True, slots=True)
class Queue:
    """Who is ahead of whom: first those that run, then those that wait, in their order."""

    work_s: Floats
    """(K × requests) instance-seconds left by candidate; the same at all of them for a request that
    is not to follow the level."""
    slack_s: Floats
    """(requests) until each must have its last token; infinite for one that cannot be helped by
    the level, such as one that runs: nobody is ahead of it any more."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Arrivals to come, as many as lately."""

    rate: float
    """Arrivals a second."""
    work_s: Floats
    """(K) instance-seconds of the mean one by candidate."""
    slack_s: float
    """From arrival until it must have its last token."""
    horizon_s: float
    """How far ahead."""


def highest_level(queue: Queue, forecast: Forecast, *, capacity: float, reserve_s: Floats) -> float:
    """The highest level, 0 to K − 1, at which everybody who waits and everybody who comes within
    the horizon is in time: work ahead ÷ capacity + reserve ≤ slack. If there is none: 0. Between
    two candidates everything is linear in the level.

    `capacity`: instance-seconds a second. `reserve_s`: (K) by candidate; what a request in service
    loses to those behind it, who are served beside it.
    """
    spare = _spare_s(queue, forecast, capacity, reserve_s)
    fits: list[bool] = (spare.min(axis=1) >= 0.0).tolist()
    level = 0
    while level + 1 < len(fits) and fits[level + 1]:
        level += 1
    if level + 1 == len(fits) or not fits[level]:
        return float(level)
    here, there = spare[level], spare[level + 1]
    short = there < 0.0
    return level + float((here[short] / (here[short] - there[short])).min())


def _spare_s(queue: Queue, forecast: Forecast, capacity: float, reserve_s: Floats) -> Floats:
    """(K, requests with a finite slack + 2) seconds that each has beyond what it needs; the last
    two are the next to arrive, and the last to arrive within the horizon."""
    ahead = np.cumsum(queue.work_s, axis=1)
    total = ahead[:, -1:] if ahead.size else np.zeros((forecast.work_s.size, 1))
    later = total + (forecast.rate * forecast.horizon_s * forecast.work_s)[:, None]
    held = np.flatnonzero(np.isfinite(queue.slack_s))
    before = ahead[:, held] - queue.work_s[:, held]
    needed = np.concatenate([before, total, later], axis=1) / capacity + reserve_s[:, None]
    coming = [forecast.slack_s, forecast.slack_s + forecast.horizon_s]
    result: Floats = np.append(queue.slack_s[held], coming) - needed
    return result
