"""Asks the scheduler to empty an instance. Knows it by its worker's name."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import UnavailableError
from dilaserve.messages import encode
from dilaserve.plan_messages import Drain, NotDrained, decode_drained

__all__ = ["BusDrainer"]

TIMEOUT_S = 2.0
"""For one answer, which comes at once."""


class BusDrainer:
    """See Drainer. `id_of` tells the instance id of a worker's name, None where it is not heard."""

    def __init__(self, bus: Bus, id_of: Callable[[str], str | None], *, hold_s: float) -> None:
        """`hold_s`: for so long a word holds that is not repeated."""
        self._bus = bus
        self._id_of = id_of
        self._hold_s = hold_s
        self._ids: dict[str, str] = {}
        """As last heard: of those that have left, too."""

    async def drain(self, name: str) -> int:
        """See Drainer."""
        return await self._ask(name, resume=False)

    async def resume(self, name: str) -> None:
        """See Drainer."""
        await self._ask(name, resume=True)

    async def _ask(self, name: str, *, resume: bool) -> int:
        instance_id = self._id_of(name) or self._ids.get(name)
        if instance_id is None:
            raise UnavailableError(f"{name} is not heard")
        self._ids[name] = instance_id
        message = Drain(instance_id=instance_id, resume=resume, hold_s=self._hold_s)
        data = (await self._bus.request(subjects.DRAIN, encode(message), timeout_s=TIMEOUT_S)).data
        try:
            answer = decode_drained(data)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"the answer about {name} makes no sense: {error}") from error
        if isinstance(answer, NotDrained):
            raise UnavailableError(f"{instance_id}: {answer.reason}")
        return answer.n_left
