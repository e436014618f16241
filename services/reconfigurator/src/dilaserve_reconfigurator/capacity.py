"""How many GPUs serve while a transition is carried out, and for how long they were too few.

A GPU serves from when its instance is up until it is told to end. Counted in GPUs, since every
degree can be compared so without a profile, and the floor has to hold before there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilaserve_reconfigurator.stage2 import Placed, Slot

__all__ = ["Capacity"]


class Capacity:
    """`floor`: fewer GPUs than that, or none, is a pause."""

    def __init__(self, running: Sequence[Placed], floor: int) -> None:
        self._slots = {placed.instance_id: placed.slot for placed in running}
        self._least = max(floor, 1)
        self._since = 0.0
        self.pause_s = 0.0
        """Seconds in which too few served, up to the last change."""
        self.lowest = self.n_serving
        """Fewest GPUs that served at any time."""
        self.lost: set[str] = set()
        """Instances that died."""

    @property
    def n_serving(self) -> int:
        """GPUs."""
        return sum(slot.tp_degree for slot in self._slots.values())

    def names(self) -> set[str]:
        """Of the instances that serve."""
        return set(self._slots)

    def slots(self) -> list[Slot]:
        """Where instances serve."""
        return list(self._slots.values())

    def without(self, names: Iterable[str]) -> int:
        """GPUs that serve beside those of these instances."""
        gone = set(names)
        return sum(slot.tp_degree for name, slot in self._slots.items() if name not in gone)

    def begin(self, now: float) -> None:
        """Time counts from now."""
        self._since = now

    def join(self, now: float, name: str, slot: Slot) -> None:
        """An instance is up."""
        self._count(now)
        self._slots[name] = slot

    def stop(self, now: float, name: str) -> None:
        """An instance is told to end."""
        self._count(now)
        self._slots.pop(name, None)
        self.lowest = min(self.lowest, self.n_serving)

    def lose(self, now: float, name: str) -> bool:
        """An instance has died; False for one that did not serve."""
        if name not in self._slots:
            return False
        self.lost.add(name)
        self.stop(now, name)
        return True

    def paused_s(self, now: float) -> float:
        """Seconds in which too few served, until now."""
        self._count(now)
        return self.pause_s

    def _count(self, now: float) -> None:
        if self.n_serving < self._least:
            self.pause_s += now - self._since
        self._since = now
