"""Kill -9 of a worker or of the scheduler under twenty streams: every text comes out the same.

The undisturbed run is the reference. Each disturbed one must equal it, must really have been
disturbed (another epoch, or another term), and must replay from its record.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from dilaserve.crashpoints import CrashPoint
from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.store.redis import connect_redis
from dilaserve.supervisor.child import Child
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

from .streams import MODEL, Streamed, load_records, replays, stream_all

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

N_MOMENTS = 10
WORKER_POINTS: tuple[CrashPoint, ...] = (
    "worker.command_in_flight",
    "worker.before_forward",
    "worker.after_forward",
    "worker.after_commit",
)


def options(home: Path) -> StackOptions:
    """Two workers on ports of their own."""
    return StackOptions(home=home, model=MODEL, port=free_port(), n_workers=2, threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack for everything that needs no crash point armed at its start."""
    home = tmp_path_factory.mktemp("stack")
    async with running_stack(options(home), environ=os.environ, log=print_line) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(stack: Stack) -> list[str]:
    """The texts of the undisturbed run, which must be more than blank."""
    streams = await stream_all(stack)
    assert len({stream.text for stream in streams}) > len(streams) // 2
    return [stream.text for stream in streams]


@pytest.mark.parametrize("moment", range(N_MOMENTS))
async def test_a_worker_killed_at_a_random_moment_changes_no_text(
    stack: Stack, reference: list[str], moment: int
) -> None:
    rng = random.Random(moment)
    running = asyncio.create_task(stream_all(stack))
    await until_a_stream_runs(stack)
    await asyncio.sleep(rng.uniform(0.0, 0.8))
    await kill(stack[rng.choice(["worker-1", "worker-2"])])
    await check(stack, await running, reference, moved=True)


@pytest.mark.parametrize("point", WORKER_POINTS)
async def test_a_worker_killed_at_a_named_point_changes_no_text(
    tmp_path: Path, reference: list[str], point: CrashPoint
) -> None:
    async with armed_stack(tmp_path, f"worker-1={point}:20") as stack:
        streams = await stream_all(stack)
        assert stack["worker-1"].n_restarts == 1
        await check(stack, streams, reference, moved=True)


async def test_a_scheduler_killed_after_an_admission_changes_no_text(
    tmp_path: Path, reference: list[str]
) -> None:
    async with armed_stack(tmp_path, "scheduler=scheduler.after_admit:8") as stack:
        streams = await stream_all(stack)
        assert stack["scheduler"].n_restarts == 1
        await check(stack, streams, reference, moved=False)


async def test_a_scheduler_killed_after_a_reassignment_changes_no_text(
    tmp_path: Path, reference: list[str]
) -> None:
    async with armed_stack(tmp_path, "scheduler=scheduler.after_reassign:3") as stack:
        running = asyncio.create_task(stream_all(stack))
        await until_a_stream_runs(stack)
        await asyncio.sleep(0.2)
        await kill(stack["worker-1"])
        streams = await running
        assert stack["scheduler"].n_restarts == 1
        await check(stack, streams, reference, moved=True)


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails."""
    print(f"{name}: {line}")


@asynccontextmanager
async def armed_stack(home: Path, crash_at: str) -> AsyncIterator[Stack]:
    """A stack, one process of which dies at a named point in its first life."""
    environ = {**os.environ, variable("crash_at"): crash_at}
    async with running_stack(options(home), environ=environ, log=print_line) as stack:
        yield stack


async def until_a_stream_runs(stack: Stack) -> None:
    """Return once a request is active."""
    store = await connect_redis(stack.endpoints.redis_url)
    try:
        async with asyncio.timeout(20):
            while not await store.active():
                await asyncio.sleep(0.01)
    finally:
        await store.close()


async def kill(child: Child) -> None:
    """Kill -9 once it is ready."""
    async with asyncio.timeout(30):
        while child.phase != "ready":
            await asyncio.sleep(0.01)
    child.signal(signal.SIGKILL)


async def check(
    stack: Stack, streams: list[Streamed], reference: list[str], *, moved: bool
) -> None:
    """The texts are the reference's, somebody was really moved, and all replays agree."""
    assert [stream.text for stream in streams] == reference
    records = await load_records(stack, streams)
    assert any(record.epoch > 1 for record in records) == moved
    for stream, report in zip(streams, await replays(stack, streams), strict=True):
        assert report.agrees, (stream.request_id, report.difference)
