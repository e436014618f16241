"""How tests make the memory store fail, and its clock."""

from __future__ import annotations

import pytest

from dilaserve.errors import StoreUnavailableError
from dilaserve.store.memory import MemoryStore
from dilaserve.testing import admitted, canvas_of, new_request, record_of, step_of


async def test_down_refuses_every_call_and_changes_nothing() -> None:
    store = MemoryStore()
    id_ = await admitted(store)
    store.down = True
    for call in (store.commit([step_of(id_, 1, {0: 7})]), store.load([id_]), store.run_id()):
        with pytest.raises(StoreUnavailableError, match="nothing was written"):
            await call
    store.down = False
    assert (await record_of(store, id_)).step == 0


async def test_lost_answers_are_of_calls_that_were_carried_out() -> None:
    store = MemoryStore()
    id_ = await admitted(store)
    store.lose_answers = 1
    with pytest.raises(StoreUnavailableError, match="the write has happened"):
        await store.commit([step_of(id_, 1, {0: 7})])
    assert await store.commit([step_of(id_, 1, {0: 7})]) == ["duplicate"]


async def test_restored_it_has_forgotten_what_came_later() -> None:
    store = MemoryStore()
    id_ = await admitted(store)
    await store.commit([step_of(id_, 1, {0: 7})])
    saved, run = store.snapshot(), await store.run_id()
    await store.commit([step_of(id_, 2, {1: 8})])
    await store.cancel(id_, reason="left")
    store.restore(saved)
    record = await record_of(store, id_)
    assert (record.state, record.step, record.canvas) == ("active", 1, canvas_of(p0=7))
    assert [delta.step for delta in await store.deltas(id_)] == [1]
    assert await store.run_id() != run
    await store.commit([step_of(id_, 2, {1: 9})])
    store.restore(saved)
    assert (await record_of(store, id_)).step == 1


async def test_time_is_the_clocks() -> None:
    now = [100.0]
    store = MemoryStore(clock=lambda: now[0], retention_s=10.0)
    fresh, ended = new_request(), await admitted(store)
    await store.new(fresh, expire_s=30.0)
    await store.cancel(ended, reason="left")
    assert await store.take_lease("a", ttl_s=5.0) == 2
    now[0] += 9.9
    assert await store.take_lease("b", ttl_s=5.0) == 3
    assert (await record_of(store, ended)).state == "cancelled"
    now[0] += 0.2
    assert await store.load([ended, fresh.request_id]) == [
        None,
        await record_of(store, fresh.request_id),
    ]
    now[0] += 20.0
    assert await store.load([fresh.request_id]) == [None]
    assert await store.deltas(ended) == []
