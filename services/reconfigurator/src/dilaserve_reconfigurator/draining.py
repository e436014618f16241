"""Asks the scheduler to empty an instance. Knows it by its worker's name."""

from __future__ import annotations

from collections.abc import Callable

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import UnavailableError
from dilaserve.messages import encode
from dilaserve.plan_messages import Drain

__all__ = ["BusDrainer"]


class BusDrainer:
    """See Drainer. `id_of` tells the instance id of a worker's name, None where it is not heard."""

    def __init__(self, bus: Bus, id_of: Callable[[str], str | None], *, timeout_s: float) -> None:
        self._bus = bus
        self._id_of = id_of
        self._timeout_s = timeout_s

    async def drain(self, name: str) -> None:
        """See Drainer."""
        await self._ask(name, resume=False)

    async def resume(self, name: str) -> None:
        """See Drainer."""
        await self._ask(name, resume=True)

    async def _ask(self, name: str, *, resume: bool) -> None:
        instance_id = self._id_of(name)
        if instance_id is None:
            raise UnavailableError(f"{name} is not heard")
        message = encode(Drain(instance_id=instance_id, resume=resume))
        await self._bus.request(subjects.DRAIN, message, timeout_s=self._timeout_s)
