"""Kill -9 of the planner at every named stage of a plan: its next life finishes, with real
workers, or goes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import start_nats, start_valkey
from dilaserve.messages import Heartbeat, InstanceDown, decode_worker_event
from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ

from .streams import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROFILES = ProfileSet(
    model="tiny",
    device="cpu",
    profiles=[
        LatencyProfile(tp_degree=degree, points=[Point(32, 0.01), Point(1024, 0.1)])
        for degree in (1, 2, 3)
    ],
)


@dataclass
class Home:
    """A planner's folders and servers, and the workers that are heard."""

    folder: Path
    environ: dict[str, str]
    heard: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Worker's name → when, and its TP degree."""
    planners: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def planner(self, **environ: str) -> asyncio.subprocess.Process:
        """Start it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dilaserve_reconfigurator", env={**self.environ, **environ}
        )
        self.planners.append(process)
        return process

    async def end(self) -> None:
        """All planners, then all that they have launched."""
        for process in self.planners:
            if process.returncode is None:
                process.kill()
                await process.wait()
        folder = self.folder / "instances"
        launcher = ProcessLauncher(folder, [], environ={}, environ_of=cpu_environ)
        for launched in await launcher.running():
            await launcher.stop(launched.name)

    def want(self, counts: dict[int, int], before: dict[int, int]) -> None:
        """As a planner that has just decided on a change leaves it."""
        wanted = {"counts": counts, "before": before}
        (self.folder / "instances" / "wanted.json").write_text(json.dumps(wanted))

    async def until(self, degrees: list[int]) -> None:
        """Return once exactly workers of these degrees are heard."""
        async with asyncio.timeout(240):
            while self.degrees() != degrees:
                await asyncio.sleep(0.1)

    async def until_wanted(self, counts: dict[int, int]) -> None:
        """Return once this is wanted and has been brought about."""
        path = self.folder / "instances" / "wanted.json"
        wanted = {"counts": {str(degree): n for degree, n in counts.items()}, "before": None}
        async with asyncio.timeout(240):
            while json.loads(path.read_text()) != wanted:
                await asyncio.sleep(0.1)

    def degrees(self) -> list[int]:
        now = time.monotonic()
        return sorted(degree for at_s, degree in self.heard.values() if now - at_s < 2.0)

    def receive(self, message: BusMessage) -> None:
        event = decode_worker_event(message.data)
        if isinstance(event, Heartbeat):
            self.heard[event.info.instance_id] = (time.monotonic(), event.info.tp_degree)
        elif isinstance(event, InstanceDown):
            self.heard.pop(event.instance_id, None)


@asynccontextmanager
async def home(folder: Path, *, n_slots: int = 2) -> AsyncIterator[Home]:
    (folder / "profile.json").write_bytes(msgspec.json.encode(PROFILES))
    steps = {"n_output": 64, "thresholds": [0.5, 0.9], "rows": [[8, 16]]}
    (folder / "steps.json").write_text(json.dumps(steps))
    async with start_nats() as nats, start_valkey() as valkey:
        bus = await connect_nats(nats.url, name="test")
        ours = Home(
            folder,
            {
                "PATH": os.environ["PATH"],
                "DILASERVE_NATS_URL": nats.url,
                "DILASERVE_REDIS_URL": valkey.url,
                "DILASERVE_MODEL": str(MODEL),
                "DILASERVE_PROFILE": str(folder / "profile.json"),
                "DILASERVE_RECORDED_STEPS": str(folder / "steps.json"),
                "DILASERVE_NODES": f"1x{n_slots}",
                "DILASERVE_TP_DEGREES": f"1,{n_slots}",
                "DILASERVE_DRAIN_TIMEOUT_S": "2",  # there is no scheduler
                "DILASERVE_PLANNER_MODE": "apply",
                "DILASERVE_WORKER_DEVICE": "cpu",
                "DILASERVE_INITIAL_MIX": f"{n_slots}xtp1",
                "DILASERVE_PLANS_DIR": str(folder / "plans"),
                "DILASERVE_INSTANCES_DIR": str(folder / "instances"),
            },
        )
        await bus.subscribe(subjects.ALL_WORKER_EVENTS, ours.receive)
        try:
            yield ours
        finally:
            await ours.end()
            await bus.close()


FINISHED = ("wanted", "draining", "stopping", "stopped", "launching", "launched", "done")
UNDONE = ("undoing", "given_up")


@pytest.mark.parametrize("stage", FINISHED)
async def test_next_life_finishes_what_was_under_way(tmp_path: Path, stage: str) -> None:
    async with home(tmp_path) as ours:
        await killed_at(ours, stage, {2: 1}, before={1: 2})
        third = await ours.planner()
        await ours.until_wanted({2: 1})
        await ours.until([2])
        await end(third)


@pytest.mark.parametrize("stage", UNDONE)
async def test_next_life_goes_back_from_what_cannot_be_finished(tmp_path: Path, stage: str) -> None:
    """The model has eight heads: no instance of TP-3 ever serves, and the planner finds out."""
    async with home(tmp_path, n_slots=3) as ours:
        await killed_at(ours, stage, {3: 1}, before={1: 3})
        third = await ours.planner()
        await ours.until_wanted({1: 3})
        await ours.until([1, 1, 1])
        await end(third)


async def test_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    async with home(tmp_path) as ours:
        planner = await ours.planner(DILASERVE_SILENT_TIMEOUT_S="5")
        await ours.until([1, 1])
        pids = {int(path.read_text()): path for path in (tmp_path / "instances").glob("*.pid")}
        stopped = min(pids)
        os.kill(stopped, signal.SIGSTOP)
        await ours.until([1])
        await ours.until([1, 1])
        assert not pids[stopped].exists()
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
        await end(planner)


async def killed_at(
    ours: Home, stage: str, counts: dict[int, int], *, before: dict[int, int]
) -> None:
    """A planner begins, another takes over and dies on the way to other counts."""
    first = await ours.planner()
    degrees = [degree for degree, n in before.items() for _ in range(n)]
    await ours.until(degrees)
    await end(first)
    assert ours.degrees() == degrees, "workers outlive their planner"
    ours.want(counts, before)
    second = await ours.planner(DILASERVE_CRASH_AT=f"reconfigurator.{stage}:1")
    async with asyncio.timeout(240):
        assert await second.wait() == -signal.SIGKILL


async def end(planner: asyncio.subprocess.Process) -> None:
    planner.send_signal(signal.SIGTERM)
    assert await planner.wait() == 0
