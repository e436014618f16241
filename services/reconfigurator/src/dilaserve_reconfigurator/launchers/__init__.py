"""Launchers start and end instances. One contract, whatever they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dilaserve.errors import DiLaServeError
from dilaserve_reconfigurator.slots import Slot

__all__ = ["LaunchError", "Launched", "Launcher", "refuse_beside"]


class LaunchError(DiLaServeError):
    """An instance that cannot be launched; says why, and where its log is."""


@dataclass(frozen=True, slots=True)
class Launched:
    """An instance that runs. `name` is its DILASERVE_WORKER_NAME."""

    name: str
    slot: Slot


class Launcher(Protocol):
    """Owns the instances that it has launched, in this life of its process or an earlier one."""

    async def running(self) -> list[Launched]:
        """All that run, in order of their names; those that were launched before a crash, too."""
        ...

    async def launch(self, name: str, slot: Slot) -> None:
        """Start an instance on these GPUs; returns when its process exists. Raises LaunchError,
        also when something of that name runs, or on one of them."""
        ...

    async def wait(self, name: str) -> str:
        """Until it has ended; what it says of its end. At once if nothing of that name runs."""
        ...

    async def stop(self, name: str) -> None:
        """End it, by force if it takes too long; returns when it is gone, or was already."""
        ...


def refuse_beside(other: Launched, name: str, slot: Slot) -> None:
    """Raise LaunchError if `other`, which runs, has the name or a GPU of the slot."""
    if other.name == name:
        raise LaunchError(f"an instance {name!r} runs already; stop it, or take another name")
    if other.slot.node == slot.node and set(other.slot.gpus) & set(slot.gpus):
        gpus = ", ".join(map(str, other.slot.gpus))
        raise LaunchError(
            f"instance {name!r} cannot be launched: {other.name!r} has GPUs {gpus} of node "
            f"{slot.node}; stop that one first"
        )
