"""What the course of a request was like: its steps by kind, their thresholds, its migrations; and
the report of it that clients get. Fed step by step, from the bus or the store. Knows no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dilaserve.messages import TokenDelta
from dilaserve.store.records import Delta, ServiceLevel

__all__ = ["EXTENSION", "Course", "course_of", "course_report", "meets_slo"]

EXTENSION = "dilaserve"
"""Name of the report in answers, beside OpenAI's fields."""


@dataclass(slots=True)
class Course:
    """Sums over the steps of one request. Steps that the store has lost are not among them."""

    n_steps: int = 0
    """Number of the last step."""
    n_recomputes: int = 0
    n_caches: int = 0
    n_rebuilds: int = 0
    """Passes that only rebuilt the KV cache: no steps, but work."""
    n_migrations: int = 0
    """Times that a step ran on another instance than the one before."""
    threshold_sum: float = 0.0
    _worker: str = ""

    @property
    def n_counted(self) -> int:
        """Steps that were added."""
        return self.n_recomputes + self.n_caches

    @property
    def mean_threshold(self) -> float | None:
        """Over the steps; None before the first."""
        return self.threshold_sum / self.n_counted if self.n_counted else None

    def add(self, step: TokenDelta | Delta) -> None:
        """The next step; each once."""
        self.n_steps = step.step
        self.n_recomputes += step.kind == "recompute"
        self.n_caches += step.kind == "cache"
        self.n_rebuilds += step.rebuilt
        self.n_migrations += self._worker not in ("", step.worker)
        self.threshold_sum += step.threshold
        self._worker = step.worker


def course_of(deltas: Iterable[Delta]) -> Course:
    """Of a request's stored steps, in order."""
    course = Course()
    for delta in deltas:
        course.add(delta)
    return course


def course_report(
    level: ServiceLevel,
    courses: Iterable[Course],
    *,
    latency_s: float | None,
) -> dict[str, Any]:
    """What was asked of a call, and what its requests used for it, all together. `latency_s`: from
    arrival to the last token, None before."""
    totals = list(courses)
    n_counted = sum(course.n_counted for course in totals)
    threshold_sum = sum(course.threshold_sum for course in totals)
    is_judged = latency_s is not None and level.slo_ms is not None
    return {
        "service_tier": level.service_tier,
        "priority": level.priority,
        "min_confidence": level.min_confidence,
        "slo_ms": level.slo_ms,
        "slo_met": meets_slo(level, latency_s or 0.0) if is_judged else None,
        "latency_ms": None if latency_s is None else round(1000 * latency_s, 3),
        "mean_threshold": round(threshold_sum / n_counted, 6) if n_counted else None,
        "n_steps": sum(course.n_steps for course in totals),
        "steps": {
            "recompute": sum(course.n_recomputes for course in totals),
            "cache": sum(course.n_caches for course in totals),
            "rebuild": sum(course.n_rebuilds for course in totals),
        },
        "migrations": sum(course.n_migrations for course in totals),
    }


def meets_slo(level: ServiceLevel, latency_s: float) -> bool:
    """Whether the last token came in time; without an SLO it always does."""
    return level.slo_ms is None or 1000 * latency_s <= level.slo_ms
