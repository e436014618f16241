"""The lease, over both stores."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve_scheduler.lease import Lease, LeaseLostError


async def test_a_second_scheduler_stands_by_until_the_first_is_gone(store: Store) -> None:
    first = Lease(store, holder="s1", ttl_s=5.0)
    second = Lease(store, holder="s2", ttl_s=5.0)
    assert await first.take() == 1
    waiting = asyncio.create_task(second.take())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await first.release()
    assert await asyncio.wait_for(waiting, 2.0) == 2


async def test_it_is_kept_beyond_its_time(store: Store) -> None:
    first = Lease(store, holder="s1", ttl_s=0.4)
    await first.take()
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert not await first.keep_once()
    assert await store.take_lease("s2", ttl_s=1.0) is None


async def test_run_out_but_free_it_is_taken_again_under_a_higher_term(store: Store) -> None:
    first = Lease(store, holder="s1", ttl_s=0.05)
    await first.take()
    await asyncio.sleep(0.1)
    assert await first.keep_once()
    assert first.term == 2


async def test_taken_by_another_it_is_lost(store: Store) -> None:
    first = Lease(store, holder="s1", ttl_s=0.05)
    await first.take()
    await asyncio.sleep(0.1)
    assert await store.take_lease("s2", ttl_s=5.0) == 2
    with pytest.raises(LeaseLostError, match="another scheduler has taken the lease"):
        await first.keep_once()


async def test_it_rises_above_a_term_that_was_seen(store: Store) -> None:
    first = Lease(store, holder="s1", ttl_s=5.0)
    await first.take()
    assert await first.raise_above(6)
    assert first.term == 7
    assert not await first.raise_above(6)
    assert not await first.keep_once()


async def test_while_the_store_is_away_nothing_changes() -> None:
    store = MemoryStore()
    first = Lease(store, holder="s1", ttl_s=0.05)
    await first.take()
    store.down = True
    await asyncio.sleep(0.1)
    assert not await first.keep_once()
    assert not await first.raise_above(6)
    await first.release()
    store.down = False


async def test_it_waits_for_a_store_that_is_away() -> None:
    store = MemoryStore()
    store.down = True
    waiting = asyncio.create_task(Lease(store, holder="s1", ttl_s=5.0).take())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    store.down = False
    assert await asyncio.wait_for(waiting, 2.0) == 1
