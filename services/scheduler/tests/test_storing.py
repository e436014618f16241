"""What is listed as active and has no readable record is struck off, at the start and later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import RequestRecord
from dilaserve_scheduler.core.effects import Admit, Load
from dilaserve_scheduler.core.events import AdmitAnswered, Event, Loaded
from dilaserve_scheduler.records import to_stored
from dilaserve_scheduler.storing import StoreCalls

from .fakes import write


class DamagedStore(MemoryStore):
    """The record of `bad` cannot be read."""

    async def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """See Store.load."""
        records = await super().load(request_ids)
        return [None if id_ == "bad" else r for id_, r in zip(request_ids, records, strict=True)]


@pytest.fixture
async def store() -> DamagedStore:
    """One request that can be read, one that cannot; both active."""
    store = DamagedStore()
    for name in ("bad", "good"):
        await write(store, name, arrival_s=0.0)
        await store.admit(name, term=1, owner="w-1")
    return store


def calls(store: MemoryStore, tasks: asyncio.TaskGroup, answers: list[Event]) -> StoreCalls:
    return StoreCalls(
        store,
        tasks,
        term=lambda: 1,
        shorten=lambda record: to_stored(record, offset_s=0.0),
        answer=answers.append,
    )


async def test_recovery_goes_on_without_it(store: DamagedStore) -> None:
    async with asyncio.TaskGroup() as tasks:
        found = await calls(store, tasks, []).read_active()
    assert [record.request_id for record in found] == ["good"]
    assert await store.active() == ["good"]


async def test_a_later_reading_reports_it_absent(store: DamagedStore) -> None:
    answers: list[Event] = []
    async with asyncio.TaskGroup() as tasks:
        calls(store, tasks, answers).start(Load(7, ("bad", "good")))
    (loaded,) = answers
    assert isinstance(loaded, Loaded)
    assert loaded.absent == ("bad",)
    assert await store.active() == ["good"]


async def test_a_lost_admission_is_repeated_in_one_call(store: DamagedStore) -> None:
    await write(store, "lost", arrival_s=0.0)
    answers: list[Event] = []
    async with asyncio.TaskGroup() as tasks:
        calls(store, tasks, answers).start(Admit(8, "lost", "w-1", min_epoch=4))
    (admitted,) = answers
    assert isinstance(admitted, AdmitAnswered)
    assert (admitted.answer.outcome, admitted.answer.epoch) == ("admitted", 4)
