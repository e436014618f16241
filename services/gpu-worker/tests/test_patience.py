"""Waiting for a store that fails, hangs, or comes back."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.errors import StoreUnavailableError
from dilaserve_gpu_worker.patience import Patience


class Store:
    """Fails `n_failures` times, then hangs or answers."""

    def __init__(self, *, n_failures: int = 0, hangs: bool = False) -> None:
        self.n_failures = n_failures
        self.hangs = hangs
        self.n_calls = 0
        self.was_cancelled = False

    async def call(self) -> str:
        self.n_calls += 1
        if self.n_calls <= self.n_failures:
            raise StoreUnavailableError("it is down")
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        return "answer"


async def test_it_asks_until_the_store_answers() -> None:
    store = Store(n_failures=2)
    assert await Patience().until_answered(store.call, what="call") == "answer"
    assert store.n_calls == 3


@pytest.mark.parametrize("store", [Store(hangs=True), Store(n_failures=10**6)])
async def test_its_end_ends_every_wait(store: Store) -> None:
    patience = Patience()
    waits = [asyncio.create_task(patience.until_answered(store.call, what="call")) for _ in "ab"]
    await asyncio.sleep(0)
    patience.end()
    patience.end()
    assert await asyncio.wait_for(asyncio.gather(*waits), 5) == [None, None]
    assert store.was_cancelled == store.hangs
    n_calls = store.n_calls
    assert await patience.until_answered(store.call, what="call") is None
    assert store.n_calls == n_calls


async def test_a_cancellation_is_no_end_of_patience() -> None:
    patience, store = Patience(), Store(hangs=True)
    wait = asyncio.create_task(patience.until_answered(store.call, what="call"))
    await asyncio.sleep(0)
    wait.cancel()
    patience.end()
    with pytest.raises(asyncio.CancelledError):
        await wait


async def test_what_a_call_raises_is_its_own() -> None:
    async def call() -> None:
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match="of the call"):
        await Patience().until_answered(call, what="call")
