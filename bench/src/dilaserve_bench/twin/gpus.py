"""Which GPUs of the virtual nodes are taken, by whom, and what served when.

A GPU is taken from the launch of an instance until its process is gone, so also while it loads its
weights and while it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dilaserve_bench.twin.configurations import Configuration
from dilaserve_reconfigurator.stage2 import Placed, Slot

__all__ = ["Gpus"]


@dataclass(slots=True)
class _Holder:
    slot: Slot
    serves: bool


class Gpus:
    """Slots by the name of who holds them. `nodes` are the GPUs of each node."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        self.course: list[Configuration] = []
        """Every state, in order."""
        self._holders: dict[str, _Holder] = {}

    def take(self, now: float, name: str, slot: Slot, *, serves: bool = False) -> None:
        """An instance is launched there. Raises ValueError for GPUs that are taken or not there."""
        taken = {(h.slot.node, gpu) for h in self._holders.values() for gpu in h.slot.gpus}
        for gpu in slot.gpus:
            if not gpu < self.nodes[slot.node] or (slot.node, gpu) in taken:
                raise ValueError(f"{name}: GPU {gpu} of node {slot.node} is taken, or not there")
        self._holders[name] = _Holder(slot, serves)
        self._note(now)

    def serve(self, now: float, name: str) -> None:
        """It has loaded its weights."""
        self._holders[name].serves = True
        self._note(now)

    def leave(self, now: float, name: str) -> None:
        """It ends, and takes no more requests."""
        self._holders[name].serves = False
        self._note(now)

    def free(self, now: float, name: str) -> None:
        """Its process is gone."""
        del self._holders[name]
        self._note(now)

    def slot_of(self, name: str) -> Slot:
        """Where it is."""
        return self._holders[name].slot

    def serving(self) -> tuple[Placed, ...]:
        """The instances that serve, as the planner takes them."""
        return tuple(Placed(name, h.slot) for name, h in self._holders.items() if h.serves)

    def _note(self, now: float) -> None:
        holders = self._holders.values()
        serving = Counter(h.slot.tp_degree for h in holders if h.serves)
        state = Configuration(
            at_s=now,
            serving=dict(sorted(serving.items())),
            n_taken=sum(h.slot.tp_degree for h in holders),
        )
        self.course.append(state)
