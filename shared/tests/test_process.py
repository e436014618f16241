from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from dilaserve.errors import BusUnavailableError
from dilaserve.process import run_while_open


async def test_it_ends_with_the_service() -> None:
    done = []

    async def serve() -> None:
        done.append("served")

    await run_while_open(serve(), asyncio.Event())
    assert done == ["served"]


async def test_an_error_of_the_service_is_its_own() -> None:
    async def serve() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_while_open(serve(), asyncio.Event())


async def test_a_bus_closed_for_good_ends_the_service() -> None:
    closed, cancelled = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        closed.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(BusUnavailableError, match="for good"):
        await run_while_open(serve(), closed)
    await asyncio.wait_for(cancelled.wait(), 5)


def test_what_is_there_is_not_looked_at_again() -> None:
    code = (
        "import gc; from dilaserve.process import N_YOUNG, collect_rarely; collect_rarely(); "
        "assert gc.get_freeze_count() > 1000; assert gc.get_threshold()[0] == N_YOUNG"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
