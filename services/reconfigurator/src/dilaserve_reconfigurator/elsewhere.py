"""Another place for a launch that fails where it was planned. Knows no clock and no process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilaserve_reconfigurator.stage2 import Slot

__all__ = ["other_slot"]

_Gpu = tuple[int, int]


def other_slot(
    failed: Slot, nodes: Sequence[int], taken: Iterable[Slot], later: Sequence[Slot]
) -> Slot | None:
    """Free GPUs for an instance of the same degree, as many in a row as it takes, from a multiple
    of the degree on. Best are those that nobody is to have (`later`); else those of a later launch
    of the same degree, with which it can change places. The same node comes first."""
    gone = _gpus([*taken, failed])
    degree, wanted = failed.tp_degree, _gpus(later)
    free = [slot for slot in _places(degree, nodes) if gone.isdisjoint(_gpus([slot]))]
    free.sort(key=lambda slot: (slot.node != failed.node, slot.node, slot.gpus))
    spare = [slot for slot in free if wanted.isdisjoint(_gpus([slot]))]
    return next(iter([*spare, *(slot for slot in free if slot in later)]), None)


def _places(degree: int, nodes: Sequence[int]) -> list[Slot]:
    return [
        Slot(node, tuple(range(first, first + degree)))
        for node, n_gpus in enumerate(nodes)
        for first in range(0, n_gpus - degree + 1, degree)
    ]


def _gpus(slots: Iterable[Slot]) -> set[_Gpu]:
    return {(slot.node, gpu) for slot in slots for gpu in slot.gpus}
