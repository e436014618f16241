"""The requests that wait for room, in the policy's order, one line per model."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator

from dilaserve_scheduler.core.model import Request

__all__ = ["WaitingLine"]

_Ticket = tuple[tuple[float, ...], int, Request]


class WaitingLine:
    """Parked requests. Joining and leaving cost O(log n)."""

    def __init__(self, rank: Callable[[Request], tuple[float, ...]]) -> None:
        self._rank = rank
        self._numbers = itertools.count()
        self._tickets: dict[str, int] = {}
        self._lines: dict[str, list[_Ticket]] = {}
        self.n_by_model: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    def is_empty(self, model_id: str) -> bool:
        """Whether nobody waits for an instance of the model."""
        return self._head(model_id) is None

    def models(self) -> list[str]:
        """Models for which somebody may be waiting."""
        return list(self._lines)

    def join(self, request: Request) -> None:
        """Wait. Raises ValueError for one that waits already."""
        if request.request_id in self._tickets:
            raise ValueError(f"{request.request_id} waits already; let it leave first")
        number = next(self._numbers)
        self._tickets[request.request_id] = number
        self.n_by_model[request.model_id] += 1
        line = self._lines.setdefault(request.model_id, [])
        heapq.heappush(line, (self._rank(request), number, request))

    def leave(self, request: Request) -> bool:
        """Wait no more; False for one that did not wait."""
        waited = self._tickets.pop(request.request_id, None) is not None
        self.n_by_model[request.model_id] -= waited
        return waited

    def in_order(self, model_id: str) -> Generator[Request, None, None]:
        """First of the line, then, if that one is passed over, the next, and so on. Whoever
        wants one takes it out with `leave`; those passed over keep their places."""
        line, passed = self._lines.get(model_id, []), []
        try:
            while line:
                ticket = heapq.heappop(line)
                if self._is_valid(ticket):
                    passed.append(ticket)
                    yield ticket[2]
        finally:
            for ticket in passed:
                if self._is_valid(ticket):
                    heapq.heappush(line, ticket)
            if not line:
                self._lines.pop(model_id, None)

    def _head(self, model_id: str) -> Request | None:
        line = self._lines.get(model_id, [])
        while line and not self._is_valid(line[0]):
            heapq.heappop(line)
        return line[0][2] if line else None

    def _is_valid(self, ticket: _Ticket) -> bool:
        return self._tickets.get(ticket[2].request_id) == ticket[1]
