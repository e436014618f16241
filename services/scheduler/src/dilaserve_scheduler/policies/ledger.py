"""All active requests of a policy: one by one for the few of a pass, and as columns, so that the
whole cluster is looked at in a few array operations. Remembers and scales predictions; decides
nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.policies.kinds import recomputes_left

__all__ = ["Course", "Floats", "Integers", "Ledger"]

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.intp]

GOLDEN = 0.6180339887498949
"""Multiples of it are spread evenly over 0..1, however many there are."""
FIRST_SIZE = 64


@dataclass(slots=True, eq=False)
class Course:
    """How far one request is, and what was predicted of it."""

    request: Request
    slot: int
    p50: Sequence[float]
    """Steps left when they were predicted, by candidate."""
    upper: Sequence[float]
    """The same, an upper quantile."""
    anchor: float
    """Tokens left when steps were predicted."""
    left: float
    """Tokens left now."""
    recomputes: int
    """Blocks to start."""
    n_cache: int
    """Tokens of a cache step."""
    extra: float
    """Tokens that a recompute step computes beyond a cache step."""
    deadline: float
    """The latest time to end."""
    spread: float
    """Its place in 0..1 when a share of the requests is to be treated better."""
    floor: int
    """Lowest candidate that its quality floor allows."""
    current: int
    """The candidate that it runs at."""
    cap: int = 0
    """The highest candidate that load control allowed when it was looked at last."""
    is_stale: bool = True
    """Whether the cap is to be looked at."""
    is_hopeless: bool = False

    def steps(self, k: int, *, upper: bool = False) -> float:
        """Steps left at a candidate: what was predicted shrinks with the tokens that are left, and
        is never less than one step a block."""
        predicted = self.upper[k] if upper else self.p50[k]
        return max(predicted * self.left / self.anchor, self.recomputes, 1.0)


class Ledger:
    """A slot per request; K candidate thresholds. Columns grow, slots are used again.

    What changes at steps is noted in their order, and gets into the columns when the cluster is
    looked at, all at once.
    """

    def __init__(self, n_thresholds: int) -> None:
        self.courses: dict[str, Course] = {}
        """By request id."""
        self.by_slot: list[Course | None] = []
        self._k = n_thresholds
        self._free: list[int] = []
        self._n_added = 0
        self.n_by_priority: Counter[int] = Counter()
        """Requests of each priority; none is absent."""
        self._moved = array("d")
        """Slot, tokens left and blocks to start of each that has run a step since the columns were
        looked at."""
        self._foretold = array("d")
        """Slot, anchor and steps of each that was predicted since."""
        self._mean_full: float | None = None
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self.p50 = np.zeros((self._k, size))
        self.anchor = np.ones(size)
        self.left = np.zeros(size)
        self.recomputes = np.zeros(size)
        self.deadline = np.zeros(size)
        """These, and the floor: see Course."""
        self.n_full = np.zeros(size)
        self.n_cache = np.zeros(size)
        self.start_by = np.zeros(size)
        """The latest time to start, as was reckoned when it came."""
        self.priority = np.zeros(size)
        self.floor = np.zeros(size, dtype=np.intp)
        self.is_active = np.zeros(size, dtype=bool)
        self.is_waiting = np.zeros(size, dtype=bool)
        self.is_hopeless = np.zeros(size, dtype=bool)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self.courses

    def __len__(self) -> int:
        return len(self.courses)

    def add(
        self,
        request: Request,
        *,
        steps: Sequence[float],
        upper: Sequence[float],
        deadline: float,
        n_cache: int,
        floor: int,
    ) -> Course:
        """Take a request in. It begins at the highest candidate."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._n_added += 1
        left = float(request.n_output - request.n_unmasked)
        course = self.courses[request.request_id] = Course(
            request=request,
            slot=slot,
            p50=steps,
            upper=upper,
            anchor=max(left, 1.0),
            left=left,
            recomputes=recomputes_left(request),
            n_cache=n_cache,
            extra=float(request.n_tokens - n_cache),
            deadline=deadline,
            spread=self._n_added * GOLDEN % 1.0,
            floor=floor,
            current=self._k - 1,
        )
        self._enter(course)
        return course

    def remove(self, request: Request) -> None:
        """Forget a request; unknown ones are ignored."""
        course = self.courses.pop(request.request_id, None)
        if course is not None:
            self.by_slot[course.slot] = None
            self.is_active[course.slot] = False
            self._free.append(course.slot)
            self.n_by_priority -= Counter((request.priority,))
            self._mean_full = None

    def courses_of(self, requests: Sequence[Request]) -> list[Course]:
        """Of requests that are all known."""
        courses = self.courses
        return [courses[request.request_id] for request in requests]

    def progressed(self, courses: Sequence[Course]) -> None:
        """Their requests have run a step."""
        note = self._moved.extend
        for course in courses:
            request = course.request
            course.left = left = float(request.n_output - request.n_unmasked)
            course.recomputes = recomputes = recomputes_left(request)
            note((course.slot, left, recomputes))

    def predict(
        self, course: Course, p50: Sequence[float], upper: Sequence[float], tokens_left: float
    ) -> None:
        """Steps left by threshold, predicted when so many tokens were."""
        course.p50, course.upper = p50, upper
        course.anchor = max(tokens_left, 1.0)
        course.is_stale = True
        self._foretold.extend((course.slot, course.anchor, *p50))

    def give_up(self, courses: Iterable[Course]) -> None:
        """They are hopeless."""
        for course in courses:
            course.is_hopeless = self.is_hopeless[course.slot] = True

    def hope_again(self, course: Course) -> None:
        """It is not."""
        course.is_hopeless = self.is_hopeless[course.slot] = False

    def refresh(self) -> None:
        """Bring the columns up to date: nobody looks at them at a step. Of two notes of a slot the
        later one stays."""
        if self._moved:
            slots, left, recomputes = _taken(self._moved, 3)
            at = slots.astype(np.intp)
            self.left[at], self.recomputes[at] = left, recomputes
        if self._foretold:
            slots, anchor, *p50 = _taken(self._foretold, 2 + self._k)
            at = slots.astype(np.intp)
            self.anchor[at] = anchor
            for column, steps in zip(self.p50, p50, strict=True):
                column[at] = steps

    def steps(self, slots: Integers) -> Floats:
        """Steps left by threshold, (K × requests): see Course.steps."""
        self.refresh()
        steps: Floats = np.take(self.p50, slots, axis=1)
        steps *= self.left[slots] / self.anchor[slots]
        np.maximum(steps, np.maximum(self.recomputes[slots], 1.0), out=steps)
        return steps

    def active(self) -> Integers:
        """All slots in use."""
        return np.flatnonzero(self.is_active)

    def mean_full(self) -> float:
        """Of the full lengths of all requests, of which there are some."""
        if self._mean_full is None:
            self._mean_full = float(self.n_full[self.active()].mean())
        return self._mean_full

    def _enter(self, course: Course) -> None:
        """Into all columns."""
        slot, request = course.slot, course.request
        self.by_slot[slot] = course
        self._moved.extend((slot, course.left, course.recomputes))
        self._foretold.extend((slot, course.anchor, *course.p50))
        self.n_full[slot], self.n_cache[slot] = request.n_tokens, course.n_cache
        self.deadline[slot] = self.start_by[slot] = course.deadline
        self.priority[slot], self.floor[slot] = request.priority, course.floor
        self.is_active[slot] = True
        self.is_waiting[slot] = self.is_hopeless[slot] = False
        self.n_by_priority[request.priority] += 1
        self._mean_full = None

    def _grow(self) -> None:
        old, size = dict(vars(self)), len(self.by_slot)
        new_size = max(2 * size, FIRST_SIZE)
        self._allocate(new_size)
        for name, column in old.items():
            if isinstance(column, np.ndarray):
                getattr(self, name)[..., :size] = column
        self.by_slot += [None] * (new_size - size)
        self._free = list(range(new_size - 1, size - 1, -1))


def _taken(notes: array[float], width: int) -> list[Floats]:
    """The columns of notes of so many values each, which are deleted."""
    columns = list(np.array(notes).reshape(-1, width).T)
    del notes[:]
    return columns
