"""What the planner's executor can do to the virtual cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dilaserve_bench.twin.cluster import Cluster

__all__ = ["Hands", "VirtualHands"]


class Hands(Protocol):
    """Instances have numbers."""

    def drain(self, number: int, then: Callable[[], None]) -> None:
        """Give it nothing more, and call `then` when it holds nothing."""
        ...

    def resume(self, number: int) -> None:
        """Take that back."""
        ...

    def end(self, number: int, then: Callable[[], None]) -> None:
        """Stop it, and call `then` when it is gone."""
        ...

    def launch(self, tp_degree: int, after_s: float, then: Callable[[], None]) -> int:
        """Start one that serves `after_s` from now; `then` is called when it does."""
        ...


class VirtualHands:
    """See Hands. An instance is not emptied first: it says goodbye when it is stopped, and its
    requests move then, for the price of a rebuild."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def drain(self, number: int, then: Callable[[], None]) -> None:
        """See Hands."""
        then()

    def resume(self, number: int) -> None:
        """See Hands."""

    def end(self, number: int, then: Callable[[], None]) -> None:
        """See Hands."""
        self._cluster.end(number, then)

    def launch(self, tp_degree: int, after_s: float, then: Callable[[], None]) -> int:
        """See Hands."""
        return self._cluster.launch(tp_degree, after_s, then)
