"""What the planner's executor can do to the virtual cluster. Has the scheduler empty instances as
in production: asked again and again, so that a scheduler that was started anew knows of it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dilaserve.plan_messages import Drain, Drained, NotDrained
from dilaserve_bench.twin.cluster import Cluster
from dilaserve_bench.twin.timeline import Timeline

__all__ = ["Hands", "VirtualHands"]

ASK_EVERY_S = 0.5
HOLD_S = 10.0
"""How long the scheduler remembers a word."""


class Hands(Protocol):
    """Instances have numbers."""

    def drain(self, number: int, then: Callable[[], None]) -> None:
        """Give it nothing more, and call `then` when it holds nothing."""
        ...

    def resume(self, number: int) -> None:
        """Take that back."""
        ...

    def settle(self) -> None:
        """What was launched in the place of those that were drained serves, or is given up."""
        ...

    def end(self, number: int, then: Callable[[], None]) -> None:
        """Stop it, and call `then` when it is gone."""
        ...

    def launch(self, tp_degree: int, after_s: float, then: Callable[[], None]) -> int:
        """Start one that serves `after_s` from now; `then` is called when it does."""
        ...


class VirtualHands:
    """See Hands. `send` brings a word to the scheduler, whose answers come to `answered`."""

    def __init__(
        self, cluster: Cluster, *, timeline: Timeline, send: Callable[[Drain], None]
    ) -> None:
        self._cluster = cluster
        self._timeline = timeline
        self._send = send
        self._drained: dict[int, str] = {}
        """Instance ids by number, also of those that are gone already."""
        self._waiting: dict[str, Callable[[], None]] = {}

    def drain(self, number: int, then: Callable[[], None]) -> None:
        """See Hands."""
        instance_id = self._cluster.id_of(number)
        if instance_id is None:  # it has died
            self._timeline.after(0.0, lambda _: then())
            return
        self._drained[number] = instance_id
        self._waiting[instance_id] = then
        self._ask(instance_id)

    def resume(self, number: int) -> None:
        """See Hands."""
        instance_id = self._drained.pop(number, None)
        if instance_id is not None:
            self._waiting.pop(instance_id, None)
            self._send(Drain(instance_id=instance_id, resume=True))

    def settle(self) -> None:
        """See Hands."""
        self._drained.clear()
        self._waiting.clear()

    def end(self, number: int, then: Callable[[], None]) -> None:
        """See Hands."""
        self._cluster.end(number, then)

    def launch(self, tp_degree: int, after_s: float, then: Callable[[], None]) -> int:
        """See Hands."""
        return self._cluster.launch(tp_degree, after_s, then)

    def answered(self, answer: Drained | NotDrained) -> None:
        """The scheduler says how many requests are left. An instance that it does not know has
        none."""
        if isinstance(answer, NotDrained) or answer.n_left == 0:
            then = self._waiting.pop(answer.instance_id, None)
            if then is not None:
                then()

    def _ask(self, instance_id: str) -> None:
        if instance_id in self._drained.values():
            self._send(Drain(instance_id=instance_id, hold_s=HOLD_S))
            self._timeline.after(ASK_EVERY_S, self._ask, instance_id)
