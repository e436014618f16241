"""Holds predictions against what happened. Sans-IO: answers and steps in, comparisons out.

A prediction says how many steps were left *if the request kept a threshold*, so it can be held only
against steps that were run at that threshold. It is compared when those end:

- at the request's end: with the steps that were really left;
- at a change of the threshold: with the steps run until the last prediction before the change, plus
  what that one said was left at the old threshold. What nobody ran is thus judged by a later
  prediction, what was run by the truth.

Steps whose results were lost end the comparison of everything predicted before them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dilaserve.messages import StepAnswer, StepItemResult, StepsPredicted

__all__ = ["Comparison", "Drift", "Score"]

MOST_REQUESTS = 50_000
"""Requests followed at a time; the one silent for longest is forgotten first."""
WINDOW = 2_000
"""Comparisons that a score is made of."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and what came of it, in steps."""

    predicted: float
    upper: float
    truth: float
    until: Literal["end", "change"]


class Score:
    """Of the last comparisons."""

    def __init__(self, window: int = WINDOW) -> None:
        self._last: deque[Comparison] = deque(maxlen=window)

    def add(self, comparisons: Sequence[Comparison]) -> None:
        """Take them in; the oldest go."""
        self._last.extend(comparisons)

    def __len__(self) -> int:
        return len(self._last)

    @property
    def wmape(self) -> float | None:
        """Sum of absolute errors over sum of truths; None before the first comparison."""
        total = sum(each.truth for each in self._last)
        errors = sum(abs(each.predicted - each.truth) for each in self._last)
        return errors / total if total else None

    @property
    def coverage(self) -> float | None:
        """Share of the truths at or below the upper quantile."""
        n_below = sum(each.truth <= each.upper for each in self._last)
        return n_below / len(self._last) if self._last else None


@dataclass(slots=True)
class _Prediction:
    step: int
    p50: dict[float, float]
    upper: dict[float, float]

    def against(
        self, threshold: float, truth: float, until: Literal["end", "change"]
    ) -> Comparison | None:
        p50 = self.p50.get(threshold)
        if p50 is None:
            return None
        return Comparison(p50, self.upper[threshold], truth, until)


@dataclass(slots=True)
class _Course:
    """What is known of a request: its last step, and since which step its threshold is the same."""

    step: int
    since: int
    """Steps run before the first one at `threshold`."""
    threshold: float | None = None
    """Of the last step; None if that is not known."""
    predictions: list[_Prediction] = field(default_factory=list)
    """In the order of their steps, none before `since`."""


class Drift:
    """Follows all requests whose steps are reported."""

    def __init__(self, most_requests: int = MOST_REQUESTS) -> None:
        self._most = most_requests
        self._courses: OrderedDict[str, _Course] = OrderedDict()

    def __len__(self) -> int:
        return len(self._courses)

    def answered(self, predicted: StepsPredicted) -> None:
        """These predictions were made. Those before a first step are left out, as in the error that
        a training states: nothing was known yet."""
        for answer in predicted.answers:
            if answer.step > 0:
                self._remember(answer, predicted.thresholds)

    def stepped(self, item: StepItemResult) -> list[Comparison]:
        """A step was reported: what can be compared now."""
        if item.outcome not in ("committed", "duplicate"):
            return []
        course = self._course(item.request_id, before=item.step - 1)
        if item.step <= course.step:
            return []
        found = list(_advance(course, item))
        if item.finish_reason is not None:
            del self._courses[item.request_id]
        return found

    def _remember(self, answer: StepAnswer, thresholds: Sequence[float]) -> None:
        course = self._course(answer.request_id, before=answer.step)
        if answer.step > course.step:
            _lose_track(course, answer.step)
        if answer.step >= course.since:
            p50 = dict(zip(thresholds, answer.p50, strict=True))
            upper = dict(zip(thresholds, answer.upper, strict=True))
            course.predictions.append(_Prediction(answer.step, p50, upper))
            course.predictions.sort(key=lambda prediction: prediction.step)

    def _course(self, request_id: str, *, before: int) -> _Course:
        course = self._courses.get(request_id)
        if course is None:
            course = self._courses[request_id] = _Course(step=before, since=before)
            if len(self._courses) > self._most:
                self._courses.popitem(last=False)
        self._courses.move_to_end(request_id)
        return course


def _advance(course: _Course, item: StepItemResult) -> Iterator[Comparison]:
    if item.step > course.step + 1:
        _lose_track(course, item.step - 1)
    if course.threshold is not None and item.threshold != course.threshold:
        yield from _at_change(course, course.threshold)
        course.since = course.step
        course.predictions = [each for each in course.predictions if each.step >= course.since]
    course.step, course.threshold = item.step, item.threshold
    if item.finish_reason is not None:
        for each in course.predictions:
            comparison = each.against(item.threshold, item.step - each.step, "end")
            if comparison is not None:
                yield comparison


def _at_change(course: _Course, threshold: float) -> Iterator[Comparison]:
    if not course.predictions:
        return
    *earlier, last = course.predictions
    left = last.p50.get(threshold)
    for each in earlier:
        if left is not None and each.step < last.step:
            comparison = each.against(threshold, last.step - each.step + left, "change")
            if comparison is not None:
                yield comparison


def _lose_track(course: _Course, step: int) -> None:
    """What was run up to `step` is not known."""
    course.step = course.since = step
    course.threshold = None
    course.predictions.clear()
