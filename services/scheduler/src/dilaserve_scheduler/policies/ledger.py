"""All active requests of a policy as columns, so that a pass or the whole cluster is looked at in a
few array operations. Remembers and scales predictions; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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
N_MORE = len(("anchor", "left", "recomputes", "extra", "deadline"))


class Course(NamedTuple):
    """How far one request is, and what was predicted of it."""

    p50: list[float]
    upper: list[float]
    anchor: float
    left: float
    recomputes: float
    extra: float
    deadline: float

    def steps(self, k: int, *, upper: bool = False) -> float:
        """See Ledger.steps."""
        predicted = self.upper[k] if upper else self.p50[k]
        return max(predicted * self.left / self.anchor, self.recomputes, 1.0)


class Ledger:
    """A slot per request; K candidate thresholds. Columns grow, slots are used again."""

    def __init__(self, n_thresholds: int) -> None:
        self.slots: dict[str, int] = {}
        self.requests: list[Request | None] = []
        self._k = n_thresholds
        self._free: list[int] = []
        self._n_added = 0
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self._courses = np.zeros((size, 2 * self._k + N_MORE))
        """What is needed at every step, side by side; the next eight are parts of it."""
        self.p50 = self._courses[:, : self._k]
        """Steps left when they were predicted."""
        self.upper = self._courses[:, self._k : 2 * self._k]
        """The same, an upper quantile."""
        more = self._courses[:, 2 * self._k :].T
        self.anchor, self.left, self.recomputes, self.extra, self.deadline = more
        """Tokens left when steps were predicted, and now; blocks to start; tokens that a recompute
        step computes beyond a cache step; the latest time to end."""
        self.anchor[:] = 1.0
        self.n_full = np.zeros(size)
        self.n_cache = np.zeros(size)
        self.start_by = np.zeros(size)
        """The latest time to start, as was reckoned when it came."""
        self.priority = np.zeros(size)
        self.floor = np.zeros(size, dtype=np.intp)
        """Lowest candidate that its quality floor allows."""
        self.spread = np.zeros(size)
        """Its place in 0..1 when a share of the requests is to be treated better."""
        self.current = np.zeros(size, dtype=np.intp)
        """The candidate that it runs at."""
        self.cap = np.zeros(size, dtype=np.intp)
        """The highest candidate that load control allowed when it was looked at last."""
        self.is_stale = np.zeros(size, dtype=bool)
        """Whether the cap is to be looked at."""
        self.is_active = np.zeros(size, dtype=bool)
        self.is_waiting = np.zeros(size, dtype=bool)
        self.is_hopeless = np.zeros(size, dtype=bool)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def add(
        self,
        request: Request,
        *,
        steps: Sequence[float],
        upper: Sequence[float],
        deadline: float,
        n_cache: int,
        floor: int,
    ) -> int:
        """Take a request in; its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.slots[request.request_id] = slot
        self.requests[slot] = request
        self.n_full[slot], self.n_cache[slot] = request.n_tokens, n_cache
        self.extra[slot] = request.n_tokens - n_cache
        self.deadline[slot] = self.start_by[slot] = deadline
        self.priority[slot] = request.priority
        self.floor[slot] = floor
        self._n_added += 1
        self.spread[slot] = self._n_added * GOLDEN % 1.0
        self.is_active[slot] = self.is_stale[slot] = True
        self.is_waiting[slot] = self.is_hopeless[slot] = False
        self.left[slot] = request.n_output - request.n_unmasked
        self.recomputes[slot] = recomputes_left(request)
        self.predict(slot, steps, upper, float(self.left[slot]))
        return slot

    def remove(self, request: Request) -> None:
        """Forget a request; unknown ones are ignored."""
        slot = self.slots.pop(request.request_id, None)
        if slot is not None:
            self.requests[slot] = None
            self.is_active[slot] = False
            self._free.append(slot)

    def slots_of(self, requests: Sequence[Request]) -> Integers:
        """Of requests that are all known."""
        slots = self.slots
        return np.array([slots[r.request_id] for r in requests], dtype=np.intp)

    def progressed(self, slots: Integers, requests: Sequence[Request]) -> None:
        """They have run a step."""
        self.left[slots] = [r.n_output - r.n_unmasked for r in requests]
        self.recomputes[slots] = [recomputes_left(r) for r in requests]

    def predict(
        self, slot: int, p50: Sequence[float], upper: Sequence[float], tokens_left: float
    ) -> None:
        """Steps left by threshold, predicted when so many tokens were."""
        self.p50[slot], self.upper[slot] = p50, upper
        self.anchor[slot] = max(tokens_left, 1.0)
        self.is_stale[slot] = True

    def courses(self, slots: Integers | list[int]) -> list[Course]:
        """Of so few requests that looking at each by itself is faster."""
        k = self._k
        return [
            Course(row[:k], row[k : 2 * k], *row[2 * k :]) for row in self._courses[slots].tolist()
        ]

    def steps(self, slots: Integers, *, upper: bool = False) -> Floats:
        """Steps left by threshold, (requests × K): what was predicted shrinks with the tokens that
        are left, and is never less than one step a block."""
        predicted = self.upper[slots] if upper else self.p50[slots]
        scaled = predicted * (self.left[slots] / self.anchor[slots])[:, None]
        least = np.maximum(self.recomputes[slots], 1.0)
        result: Floats = np.maximum(scaled, least[:, None])
        return result

    def active(self) -> Integers:
        """All slots in use."""
        return np.flatnonzero(self.is_active)

    def _grow(self) -> None:
        old, size = dict(vars(self)), len(self.requests)
        new_size = max(2 * size, FIRST_SIZE)
        self._allocate(new_size)
        for name, column in old.items():
            if isinstance(column, np.ndarray):
                getattr(self, name)[:size] = column
        self.requests += [None] * (new_size - size)
        self._free = list(range(new_size - 1, size - 1, -1))
