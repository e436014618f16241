"""The live instances of each model, the least loaded first. Knows no policy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from dilaserve_scheduler.core.model import Instance, Request

__all__ = ["LeastLoaded"]

MAX_STALE = 8
"""Entries per instance at which the heap is built anew."""

_Entry = tuple[int, int, Instance]


@dataclass(slots=True)
class _Pool:
    """The instances of one model; the heap holds stale entries too."""

    instances: dict[str, Instance] = field(default_factory=dict)
    heap: list[_Entry] = field(default_factory=list)
    largest_budget: int = 0
    total_budget: int = 0

    def measure(self) -> None:
        budgets = [instance.token_budget for instance in self.instances.values()]
        self.largest_budget, self.total_budget = max(budgets, default=0), sum(budgets)

    def push(self, instance: Instance) -> None:
        if len(self.heap) >= MAX_STALE * len(self.instances):
            self.heap = [_entry(other) for other in self.instances.values()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, _entry(instance))


class LeastLoaded:
    """Adding, removing and changing the load of an instance: O(log n), amortised."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def add(self, instance: Instance) -> None:
        """A live instance."""
        pool = self._pools.setdefault(instance.model_id, _Pool())
        pool.instances[instance.instance_id] = instance
        pool.measure()
        pool.push(instance)

    def remove(self, instance: Instance) -> None:
        """It is not live any more; unknown ones are ignored."""
        pool = self._pools.get(instance.model_id)
        if pool is not None and pool.instances.pop(instance.instance_id, None) is not None:
            pool.measure()

    def update(self, instance: Instance) -> None:
        """Its load has changed; unknown ones are ignored."""
        pool = self._pools.get(instance.model_id)
        if pool is not None and instance.instance_id in pool.instances:
            pool.push(instance)

    def total_budget(self, model_id: str) -> int:
        """Tokens (full lengths) that all instances of the model hold at a time."""
        pool = self._pools.get(model_id)
        return pool.total_budget if pool is not None else 0

    def first(self, model_id: str) -> Instance | None:
        """The least loaded instance; of equally loaded ones the first to join."""
        pool = self._pools.get(model_id)
        while pool is not None and pool.heap:
            if _is_current(pool, pool.heap[0]):
                return pool.heap[0][2]
            heapq.heappop(pool.heap)
        return None

    def first_with_room(self, request: Request) -> Instance | None:
        """The least loaded instance that has room for the request."""
        passed: list[_Entry] = []
        found: Instance | None = None
        while found is None and (instance := self.first(request.model_id)) is not None:
            pool = self._pools[request.model_id]
            if instance.has_room(request):
                found = instance
            elif instance.n_tokens + request.n_tokens > pool.largest_budget:
                break  # the others are loaded as much or more
            else:
                passed.append(heapq.heappop(pool.heap))
        for entry in passed:
            heapq.heappush(self._pools[request.model_id].heap, entry)
        return found


def _entry(instance: Instance) -> _Entry:
    return instance.n_tokens, instance.number, instance


def _is_current(pool: _Pool, entry: _Entry) -> bool:
    n_tokens, _, instance = entry
    return instance.n_tokens == n_tokens and instance.instance_id in pool.instances
