"""The live instances by TP degree, and which would run a request's steps fastest (Algorithm 3).

Within a degree the least loaded is the fastest, so that looking at one of each looks at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies.least_loaded import LeastLoaded

__all__ = ["Fastest", "tp_degree"]

StepSeconds = Callable[[Instance, Request], float]
"""Latency of a pass of the instance with the request in it."""


class Fastest:
    """Adding, removing and changing the load of an instance: O(log n), amortised."""

    def __init__(self) -> None:
        self.all = LeastLoaded()
        self.instances: dict[str, Instance] = {}
        self.n_by_degree: Counter[int] = Counter()
        """Instances of each TP degree; none is 0."""
        self._by_degree: dict[int, LeastLoaded] = {}

    def add(self, instance: Instance) -> None:
        """A live instance."""
        self.remove(instance)
        degree = tp_degree(instance)
        self.instances[instance.instance_id] = instance
        self.n_by_degree[degree] += 1
        self.all.add(instance)
        self._by_degree.setdefault(degree, LeastLoaded()).add(instance)

    def remove(self, instance: Instance) -> None:
        """It is not live any more; unknown ones are ignored."""
        if self.instances.pop(instance.instance_id, None) is not None:
            degree = tp_degree(instance)
            self.n_by_degree[degree] -= 1
            self.all.remove(instance)
            self._by_degree[degree].remove(instance)

    def update(self, instance: Instance) -> None:
        """Its load has changed; unknown ones are ignored."""
        if instance.instance_id in self.instances:
            self.all.update(instance)
            self._by_degree[tp_degree(instance)].update(instance)

    def with_room(self, request: Request, step_s: StepSeconds) -> Instance | None:
        """The instance with room whose pass with the request in it is shortest; of equal ones the
        least loaded, then the first to join."""
        if len(self._by_degree) <= 1:
            return self.all.first_with_room(request)
        found = [pool.first_with_room(request) for pool in self._by_degree.values()]
        rooms = [instance for instance in found if instance is not None]
        return min(rooms, key=lambda i: (step_s(i, request), i.n_tokens, i.number), default=None)

    def degrees(self) -> list[int]:
        """TP degrees of the instances, the highest first; empty without instances."""
        return sorted((d for d, n in self.n_by_degree.items() if n), reverse=True)


def tp_degree(instance: Instance) -> int:
    """Of an instance that was heard."""
    return instance.info.tp_degree if instance.info is not None else 1
