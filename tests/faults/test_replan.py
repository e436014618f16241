"""The mix of TP degrees changes under twenty streams, with real workers: no request fails, and
every text comes out as in the undisturbed run.

The stack's own worker stays, so that there is always somewhere to go; the keeper's four slots
change around it. The scheduler knows no draining yet: an instance that is stopped says goodbye, and
its requests move.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import free_port
from dilaserve.messages import Heartbeat, InstanceDown, InstanceUp, decode_worker_event
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack
from dilaserve_reconfigurator.draining import BusDrainer
from dilaserve_reconfigurator.execution import Patience
from dilaserve_reconfigurator.executor import Executor, Report
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ
from dilaserve_reconfigurator.members import Members

from .streams import MODEL, load_records, stream_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIXES = ({1: 2, 2: 1}, {1: 0, 2: 2}, {1: 4, 2: 0})
SLOTS = 4
N_EVENTS = 100
"""Events of all streams together at which the change begins."""


async def test_no_request_fails_and_no_text_changes_while_the_mix_does(tmp_path: Path) -> None:
    options = StackOptions(
        home=tmp_path, model=MODEL, port=free_port(), n_workers=1, threads=1, policy="infaas"
    )
    async with running_stack(options, environ=os.environ, log=print_line) as stack:
        reference = [stream.text for stream in await stream_all(stack)]
        async with keeping(stack, tmp_path / "instances") as keeper:
            await keeper.keep()
            for mix in MIXES:
                await change_under_streams(stack, keeper, mix, reference)


async def change_under_streams(
    stack: Stack, keeper: Keeper, mix: dict[int, int], reference: list[str]
) -> None:
    """Begin in the middle of the streams, and run them again until the mix is there."""
    changes: list[asyncio.Task[Report | None]] = []

    def change() -> None:
        changes.append(asyncio.create_task(keeper.change_to(mix)))

    n_moved = 0
    streams = await stream_all(stack, n_events=N_EVENTS, then=change)
    while streams:
        assert [stream.text for stream in streams] == reference
        records = await load_records(stack, streams)
        n_moved += sum(record.epoch > 1 for record in records)
        streams = [] if changes[0].done() else await stream_all(stack)
    report = await changes[0]
    assert report is not None
    assert (report.phase, report.reason) == ("done", "")
    assert n_moved, "nobody was disturbed"
    print_line("keeper", f"{mix} after {report.seconds:.1f} s, {n_moved} moved")


@asynccontextmanager
async def keeping(stack: Stack, folder: Path) -> AsyncIterator[Keeper]:
    """A keeper of four slots beside the stack; its workers end with it."""
    bus = await connect_nats(stack.endpoints.nats_url, name="keeper")
    members = Members((SLOTS,))

    def receive(message: BusMessage) -> None:
        event = decode_worker_event(message.data)
        if isinstance(event, InstanceUp | Heartbeat):
            members.heard(time.monotonic(), event.info)
        elif isinstance(event, InstanceDown):
            members.left(event.instance_id)

    def id_of(name: str) -> str | None:
        return members.id_of(time.monotonic(), name)

    async def served_by(name: str) -> None:
        while id_of(name) is None:
            await asyncio.sleep(0.05)

    launcher = ProcessLauncher(
        folder,
        [sys.executable, "-m", "dilaserve_gpu_worker"],
        environ={
            **os.environ,
            "DILASERVE_NATS_URL": stack.endpoints.nats_url,
            "DILASERVE_REDIS_URL": stack.endpoints.redis_url,
            "DILASERVE_MODEL": str(MODEL),
        },
        environ_of=cpu_environ,
    )
    names = count(1)
    executor = Executor(
        launcher,
        BusDrainer(bus, id_of, timeout_s=10.0),
        served_by=served_by,
        new_name=lambda: f"slot-{next(names)}",
        clock=time.monotonic,
        patience=Patience(drain_s=30.0, launch_s=120.0),
    )
    await bus.subscribe(subjects.ALL_WORKER_EVENTS, receive)
    try:
        yield Keeper(executor, [SLOTS], folder, {1: SLOTS})
    finally:
        for launched in await launcher.running():
            await launcher.stop(launched.name)
        await bus.close()


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails."""
    print(f"{name}: {line}")
