"""What becomes of requests: when they end, by which threshold. Sans-IO, for whoever overhears
submissions and step results, live or in the twin. Measures what plans predict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from dilaserve.messages import StepResult

__all__ = ["Observed", "Outcomes"]

N_REMEMBERED = 50_000
"""Requests kept, the oldest of which are forgotten."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of the requests that came in a span of time; None: of none."""

    seconds: float
    rate: float
    """Arrivals a second."""
    n_judged: int
    """Requests that have ended, or are late."""
    attainment: float | None = None
    """Share of these that ended within their SLO; those refused, failed or lost never do."""
    mean_latency_s: float | None = None
    """From submission to the last step, of those that have ended."""
    mean_threshold: float | None = None
    """Of the steps of a request, and then over those that have ended."""


@dataclass(slots=True)
class _Course:
    arrived_s: float
    slo_s: float
    ended_s: float | None = None
    n_steps: int = 0
    thresholds: float = 0.0
    """Sum over its steps."""


class Outcomes:
    """Follows requests. Times are seconds on one clock that never goes back."""

    def __init__(self, *, slo_s: float) -> None:
        """`slo_s`: of requests that bring none."""
        self._slo_s = slo_s
        self._courses: OrderedDict[str, _Course] = OrderedDict()

    def submitted(self, now: float, request_id: str, slo_s: float | None) -> None:
        """For the first time or again."""
        if request_id in self._courses:
            return
        self._courses[request_id] = _Course(now, slo_s if slo_s else self._slo_s)
        if len(self._courses) > N_REMEMBERED:
            self._courses.popitem(last=False)

    def cancelled(self, request_id: str) -> None:
        """Its client has gone: nothing follows from it."""
        self._courses.pop(request_id, None)

    def stepped(self, now: float, result: StepResult) -> None:
        """A pass of an instance."""
        for item in result.items:
            course = self._courses.get(item.request_id)
            if course is None or item.outcome != "committed":
                continue
            course.n_steps += 1
            course.thresholds += item.threshold
            if item.finish_reason is not None:
                course.ended_s = now

    def observed(self, since: float, now: float) -> Observed:
        """Of the requests that came since then."""
        found = list(self._since(since))
        ended = [(c, c.ended_s - c.arrived_s) for c in found if c.ended_s is not None]
        late = [c for c in found if c.ended_s is None and now > c.arrived_s + c.slo_s]
        n_judged = len(ended) + len(late)
        in_time = sum(latency_s <= course.slo_s for course, latency_s in ended)
        return Observed(
            seconds=now - since,
            rate=len(found) / max(now - since, 1e-9),
            n_judged=n_judged,
            attainment=in_time / n_judged if n_judged else None,
            mean_latency_s=_mean([latency_s for _, latency_s in ended]),
            mean_threshold=_mean([c.thresholds / c.n_steps for c, _ in ended if c.n_steps]),
        )

    def _since(self, since: float) -> Iterator[_Course]:
        """The latest first."""
        for course in reversed(self._courses.values()):
            if course.arrived_s < since:
                return
            yield course


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
