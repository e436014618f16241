"""A cancellation that a library swallowed is raised all the same, and only that one."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.cancellation import kept_cancellation

pytestmark = pytest.mark.asyncio


async def swallowing(result: asyncio.Future[str]) -> str:
    """What `asyncio.wait_for` does before Python 3.12 when its result is there already."""
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        return await result


async def test_a_swallowed_cancellation_is_raised() -> None:
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        with kept_cancellation():
            return await swallowing(result)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    result.set_result("too late")
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cleaning_up_after_a_cancellation_goes_on() -> None:
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            with kept_cancellation():
                await asyncio.sleep(0)
            cleaned.set()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert cleaned.is_set()


async def test_a_timeout_within_is_no_cancellation() -> None:
    with pytest.raises(TimeoutError), kept_cancellation():
        async with asyncio.timeout(0):
            await asyncio.sleep(60)


async def test_a_timeout_around_is_one() -> None:
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with asyncio.timeout(0.01):
            with kept_cancellation():
                asyncio.get_running_loop().call_later(0.02, never.set_result, "late")
                await swallowing(never)

    with pytest.raises(TimeoutError):
        await work()
