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
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

from .streams import MODEL, Replayer, Streamed, load_records, stream_all

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

N_MOMENTS = 10
N_EVENTS = 200
"""Events of all streams together within which a worker is killed; a run has over twice as many."""
WORKER_POINTS: tuple[tuple[CrashPoint, int], ...] = (
    ("worker.command_in_flight", 6),
    ("worker.before_forward", 12),
    ("worker.after_forward", 12),
    ("worker.after_commit", 12),
)
"""Where, and at which time of passing there; warm-up and probe pass a few times before."""


def options(home: Path) -> StackOptions:
    """Two workers on ports of their own, and one threshold, so that texts can be compared."""
    return StackOptions(
        home=home, model=MODEL, port=free_port(), n_workers=2, threads=1, policy="infaas"
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack for everything that needs no crash point armed at its start."""
    home = tmp_path_factory.mktemp("stack")
    async with running_stack(options(home), environ=os.environ, log=print_line) as stack:
        yield stack


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    """Remembers what it has replayed."""
    return Replayer()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(stack: Stack) -> list[str]:
    """The texts of the undisturbed run; no two are alike."""
    streams = await stream_all(stack)
    assert len({stream.text for stream in streams}) == len(streams)
    return [stream.text for stream in streams]


@pytest.mark.parametrize("moment", range(N_MOMENTS))
async def test_a_worker_killed_at_a_random_moment_changes_no_text(
    stack: Stack, reference: list[str], replayer: Replayer, moment: int
) -> None:
    rng = random.Random(moment)
    victim = stack[rng.choice(["worker-1", "worker-2"])]
    await until_ready(stack, "worker-1", "worker-2")
    streams = await stream_all(
        stack, n_events=rng.randrange(1, N_EVENTS), then=lambda: victim.signal(signal.SIGKILL)
    )
    assert await check(stack, streams, reference, replayer)


@pytest.mark.parametrize(("point", "count"), WORKER_POINTS)
async def test_a_worker_killed_at_a_named_point_changes_no_text(
    tmp_path: Path, reference: list[str], replayer: Replayer, point: CrashPoint, count: int
) -> None:
    async with armed_stack(tmp_path, f"worker-1={point}:{count}") as stack:
        streams = await stream_all(stack)
        assert stack["worker-1"].n_restarts == 1
        assert await check(stack, streams, reference, replayer)


async def test_a_scheduler_killed_after_an_admission_changes_no_text(
    tmp_path: Path, reference: list[str], replayer: Replayer
) -> None:
    async with armed_stack(tmp_path, "scheduler=scheduler.after_admit:8") as stack:
        streams = await stream_all(stack)
        assert stack["scheduler"].n_restarts == 1
        assert not await check(stack, streams, reference, replayer)


async def test_a_scheduler_killed_after_a_reassignment_changes_no_text(
    tmp_path: Path, reference: list[str], replayer: Replayer
) -> None:
    async with armed_stack(tmp_path, "scheduler=scheduler.after_reassign:3") as stack:
        victim = stack["worker-1"]
        streams = await stream_all(
            stack, n_events=N_EVENTS // 2, then=lambda: victim.signal(signal.SIGKILL)
        )
        assert stack["scheduler"].n_restarts == 1
        assert await check(stack, streams, reference, replayer)


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails."""
    print(f"{name}: {line}")


@asynccontextmanager
async def armed_stack(home: Path, crash_at: str) -> AsyncIterator[Stack]:
    """A stack, one process of which dies at a named point in its first life."""
    environ = {**os.environ, variable("crash_at"): crash_at}
    async with running_stack(options(home), environ=environ, log=print_line) as stack:
        yield stack


async def until_ready(stack: Stack, *names: str) -> None:
    """Return once these children serve."""
    async with asyncio.timeout(60):
        while any(stack[name].phase != "ready" for name in names):
            await asyncio.sleep(0.01)


async def check(
    stack: Stack, streams: list[Streamed], reference: list[str], replayer: Replayer
) -> bool:
    """The texts are the reference's and every replay agrees. Whether any request was moved."""
    assert [stream.text for stream in streams] == reference
    for stream, report in zip(streams, await replayer.replay(stack, streams), strict=True):
        assert report.agrees, (stream.request_id, report.difference)
    return any(record.epoch > 1 for record in await load_records(stack, streams))
