"""Carries out the core's store calls: each until it is answered, the answers coming as events.

Calls of different requests run side by side. Knows no policy and no bus.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dilaserve.errors import StoreUnavailableError
from dilaserve.store import Store
from dilaserve.store.records import RequestRecord
from dilaserve_scheduler.core.effects import Admit, Fail, ListActive, Load, Reassign
from dilaserve_scheduler.core.events import (
    ActiveListed,
    AdmitAnswered,
    Event,
    FailAnswered,
    Loaded,
    ReassignAnswered,
    StoredRequest,
)

__all__ = ["StoreCalls"]

T = TypeVar("T")
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
MAX_CALLS = 64
"""At a time; more would only queue at the server."""
MAX_RECORDS = 256
"""Read in one round trip."""

log = logging.getLogger(__name__)


class StoreCalls:
    """Starts store calls as tasks of `tasks`, and hands every answer to `answer`."""

    def __init__(
        self,
        store: Store,
        tasks: asyncio.TaskGroup,
        *,
        term: Callable[[], int],
        shorten: Callable[[RequestRecord], StoredRequest],
        answer: Callable[[Event], None],
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._term = term
        self._shorten = shorten
        self._answer = answer
        self._places = asyncio.Semaphore(MAX_CALLS)

    def start(self, effect: Admit | Reassign | Fail | Load | ListActive) -> None:
        """Carry an effect out in the background."""
        match effect:
            case Admit():
                call = self._admit(effect)
            case Reassign():
                call = self._reassign(effect)
            case Fail():
                call = self._fail(effect)
            case Load():
                call = self._load(effect)
            case ListActive():
                call = self._list_active()
        self._tasks.create_task(call)

    async def read_active(self) -> tuple[StoredRequest, ...]:
        """All active records, for recovery."""
        request_ids = await self._until_answered(self._store.active)
        records: list[StoredRequest] = []
        for chunk in _chunks(request_ids):
            found, absent = await self._read(chunk)
            records.extend(record for record in found if record.state == "active")
            for request_id in absent:
                await self._strike_off(request_id)
        return tuple(records)

    async def _admit(self, effect: Admit) -> None:
        answer = await self._until_answered(
            lambda: self._store.admit(
                effect.request_id,
                term=self._term(),
                owner=effect.owner,
                min_epoch=effect.min_epoch,
            )
        )
        self._answer(AdmitAnswered(effect.op, effect.request_id, answer))

    async def _reassign(self, effect: Reassign) -> None:
        answer = await self._until_answered(
            lambda: self._store.reassign(
                effect.request_id,
                term=self._term(),
                owner=effect.owner,
                expected_epoch=effect.expected_epoch,
                min_epoch=effect.min_epoch,
                owner_died=effect.owner_died,
            )
        )
        self._answer(ReassignAnswered(effect.op, effect.request_id, answer))

    async def _fail(self, effect: Fail) -> None:
        answer = await self._until_answered(
            lambda: self._store.fail(effect.request_id, term=self._term(), error=effect.error)
        )
        self._answer(FailAnswered(effect.op, effect.request_id, answer))

    async def _load(self, effect: Load) -> None:
        for chunk in _chunks(effect.request_ids):
            records, absent = await self._read(chunk)
            for request_id in absent:  # a damaged or listed record would be read for ever
                await self._strike_off(request_id)
            self._answer(Loaded(effect.op, records, absent))

    async def _strike_off(self, request_id: str) -> None:
        """End what has no readable record, so that the store lists it no longer."""
        await self._until_answered(
            lambda: self._store.fail(
                request_id, term=self._term(), error="its record is lost; send it again"
            )
        )

    async def _list_active(self) -> None:
        self._answer(ActiveListed(tuple(await self._until_answered(self._store.active))))

    async def _read(
        self, request_ids: tuple[str, ...]
    ) -> tuple[tuple[StoredRequest, ...], tuple[str, ...]]:
        records = await self._until_answered(lambda: self._store.load(request_ids))
        return (
            tuple(self._shorten(record) for record in records if record is not None),
            tuple(i for i, r in zip(request_ids, records, strict=True) if r is None),
        )

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._places:
                    return await call()
            except StoreUnavailableError as error:
                log.warning("the store does not answer, trying again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _chunks(request_ids: list[str] | tuple[str, ...]) -> list[tuple[str, ...]]:
    rest = iter(request_ids)
    return list(iter(lambda: tuple(itertools.islice(rest, MAX_RECORDS)), ()))
