"""The order of a transition: launches one at a time, each after the terminations that it needs.

In every state on the way no GPU belongs to two instances, and as much capacity as possible serves
(paper, 3.3). Knows no clock and no running process: after a crash, a new route starts from what
then runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import msgspec

from dilaserve_reconfigurator.stage2 import Placed, Slot, Transition

__all__ = ["Route", "Step", "find_route"]

FEW = 5
"""Launches in one part of which every order is tried."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """End these instances, then launch one."""

    terminate: list[str]
    launch: Slot | None
    """None in a last step that only ends what is not wanted."""
    n_serving: int
    """GPUs that serve once those have ended, and until that one is up."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in order."""

    steps: list[Step]
    lowest: int
    """Fewest GPUs that serve at any time on the way."""

    def keeps(self, floor: int) -> bool:
        """Whether at least so many GPUs serve at any time. Where not, requests may have to wait."""
        return self.lowest >= floor


@dataclass(frozen=True, slots=True)
class _Part:
    """Launches that wait for the same terminations, in order, and what they do to capacity."""

    steps: tuple[tuple[tuple[str, ...], Slot], ...]
    dip: int
    """GPUs that serve less than at the start, at the worst moment."""
    net: int
    """GPUs that serve more at the end."""


def find_route(transition: Transition, running: Sequence[Placed]) -> Route:
    """Parts of the transition that have no GPU in common follow one another: first those that gain
    capacity, the smallest dip first, then those that lose some, in the reverse order of their dips
    seen from the end. What ends without making room for a launch ends last."""
    leaving = {p.instance_id: p.slot for p in running if p.instance_id in transition.terminate}
    parts = [_ordered(launches, leaving) for launches in _parts(transition.launch, leaving)]
    parts.sort(key=lambda part: (0, part.dip) if part.net >= 0 else (1, -(part.dip + part.net)))
    n_serving = sum(placed.slot.tp_degree for placed in running)
    lowest = n_serving
    steps: list[Step] = []
    for names, launch in [step for part in parts for step in part.steps]:
        n_serving -= sum(leaving.pop(name).tp_degree for name in names)
        lowest = min(lowest, n_serving)
        steps.append(Step(terminate=list(names), launch=launch, n_serving=n_serving))
        n_serving += launch.tp_degree
    if leaving:
        n_serving -= sum(slot.tp_degree for slot in leaving.values())
        steps.append(Step(terminate=sorted(leaving), launch=None, n_serving=n_serving))
    return Route(steps=steps, lowest=min(lowest, n_serving))


def _parts(launches: Sequence[Slot], leaving: Mapping[str, Slot]) -> list[list[Slot]]:
    """Launches that share an instance in their way, directly or through others."""
    parts: list[tuple[set[str], list[Slot]]] = []
    for launch in launches:
        names, together = set(_in_the_way(launch, leaving)), [launch]
        apart = []
        for others, slots in parts:
            if others & names:
                names |= others
                together = [*slots, *together]
            else:
                apart.append((others, slots))
        parts = [*apart, (names, together)]
    return [slots for _, slots in parts]


def _ordered(launches: Sequence[Slot], leaving: Mapping[str, Slot]) -> _Part:
    """The order with the smallest dip: of all if they are few, else each time the cheapest."""
    if len(launches) <= FEW:
        found = (_part(order, leaving) for order in permutations(launches))
        return min(found, key=lambda part: part.dip)
    left, there = list(launches), dict(leaving)
    order = []
    while left:
        launch = min(left, key=lambda slot: _lost(_in_the_way(slot, there), there))
        left.remove(launch)
        order.append(launch)
        for name in _in_the_way(launch, there):
            del there[name]
    return _part(order, leaving)


def _part(order: Sequence[Slot], leaving: Mapping[str, Slot]) -> _Part:
    there = dict(leaving)
    net = dip = 0
    steps = []
    for launch in order:
        names = _in_the_way(launch, there)
        net -= _lost(names, there)
        dip = max(dip, -net)
        net += launch.tp_degree
        for name in names:
            del there[name]
        steps.append((tuple(names), launch))
    return _Part(tuple(steps), dip, net)


def _lost(names: Sequence[str], there: Mapping[str, Slot]) -> int:
    return sum(there[name].tp_degree for name in names)


def _in_the_way(slot: Slot, leaving: Mapping[str, Slot]) -> list[str]:
    """Those that leave and share a GPU with it."""
    return sorted(
        name
        for name, other in leaving.items()
        if other.node == slot.node and not set(other.gpus).isdisjoint(slot.gpus)
    )
