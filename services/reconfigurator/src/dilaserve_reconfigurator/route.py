"""The order of a transition: launches one at a time, each after the terminations that it needs.

In every state on the way no GPU belongs to two instances, and as much capacity as possible serves
(paper, 3.3). Knows no clock and no running process: after a crash, a new route starts from what
then runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dilaserve_reconfigurator.stage2 import Placed, Slot, Transition

__all__ = ["Route", "Step", "find_route"]


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


def find_route(transition: Transition, running: Sequence[Placed]) -> Route:
    """Launch next what costs the least capacity. What ends without making room for a launch ends
    last."""
    leaving = {p.instance_id: p.slot for p in running if p.instance_id in transition.terminate}
    waiting = list(transition.launch)
    n_serving = sum(placed.slot.tp_degree for placed in running)
    lowest = n_serving
    steps: list[Step] = []

    def end(names: list[str], launch: Slot | None) -> None:
        nonlocal n_serving, lowest
        n_serving -= sum(leaving.pop(name).tp_degree for name in names)
        lowest = min(lowest, n_serving)
        steps.append(Step(terminate=names, launch=launch, n_serving=n_serving))
        n_serving += launch.tp_degree if launch is not None else 0

    while waiting:
        launch = min(waiting, key=lambda slot: _cost(slot, leaving))
        waiting.remove(launch)
        end(_in_the_way(launch, leaving), launch)
    if leaving:
        end(sorted(leaving), None)
    return Route(steps=steps, lowest=lowest)


def _cost(slot: Slot, leaving: dict[str, Slot]) -> tuple[int, int]:
    """GPUs that stop serving for it, then its own, the most first."""
    lost = sum(leaving[name].tp_degree for name in _in_the_way(slot, leaving))
    return lost, -slot.tp_degree


def _in_the_way(slot: Slot, leaving: dict[str, Slot]) -> list[str]:
    """Those that leave and share a GPU with it."""
    return sorted(
        name
        for name, other in leaving.items()
        if other.node == slot.node and not set(other.gpus).isdisjoint(slot.gpus)
    )
