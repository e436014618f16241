"""Effects carried out with a launcher that obeys or fails, and with real processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dilaserve.errors import NoRespondersError
from dilaserve_reconfigurator import stage2
from dilaserve_reconfigurator.alone import LONGEST_LOOK_S
from dilaserve_reconfigurator.execution import Patience
from dilaserve_reconfigurator.executor import Executor, Report, Stage
from dilaserve_reconfigurator.launchers import Launched, Launcher, LaunchError
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ
from dilaserve_reconfigurator.planner import place
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.stage2 import Slot, Transition

PATIENCE = Patience(drain_s=5.0, launch_s=5.0, n_launches=2)


class MemoryLauncher:
    """Instances that are only written down."""

    def __init__(self, nodes: list[int], counts: dict[int, int]) -> None:
        self.slots = {placed.instance_id: placed.slot for placed in place(nodes, counts)}
        self.failing: set[int] = set()
        """TP degrees that end at once."""
        self.refused: set[int] = set()
        """TP degrees that cannot even be started."""
        self._ended = {name: asyncio.Event() for name in self.slots}

    async def running(self) -> list[Launched]:
        return [Launched(name, slot) for name, slot in sorted(self.slots.items())]

    async def launch(self, name: str, slot: Slot) -> None:
        if slot.tp_degree in self.refused:
            raise LaunchError("no such image")
        if name in self.slots:
            raise LaunchError(f"{name} runs already")
        taken = {(s.node, gpu) for s in self.slots.values() for gpu in s.gpus}
        assert taken.isdisjoint((slot.node, gpu) for gpu in slot.gpus)
        self.slots[name] = slot
        self._ended[name] = asyncio.Event()
        if slot.tp_degree in self.failing:
            self._ended[name].set()

    async def wait(self, name: str) -> str:
        await self._ended[name].wait()
        return "out of memory"

    async def stop(self, name: str) -> None:
        self.slots.pop(name, None)
        if name in self._ended:
            self._ended[name].set()

    def counts(self) -> dict[int, int]:
        degrees = [slot.tp_degree for slot in self.slots.values()]
        return {degree: degrees.count(degree) for degree in (1, 2, 4)}


class Drains:
    """A scheduler that empties instances at once, or not at all."""

    def __init__(self, *, never: bool = False, absent: bool = False) -> None:
        self.never = never
        self.absent = absent
        self.draining: set[str] = set()
        self.asked: list[str] = []

    async def drain(self, name: str) -> int:
        if self.absent:
            raise NoRespondersError("nobody listens")
        self.draining.add(name)
        self.asked.append(name)
        return int(self.never)

    async def resume(self, name: str) -> None:
        self.draining.discard(name)


def executor(
    launcher: Launcher,
    drainer: Drains,
    *,
    patience: Patience = PATIENCE,
    late: frozenset[str] = frozenset(),
    phases: list[Stage] | None = None,
    prefix: str = "new",
    **options: Any,
) -> Executor:
    """`late`: names that never serve."""
    names = count(1)

    async def served_by(name: str) -> None:
        if name in late or name in failing_names(launcher):
            await asyncio.Event().wait()

    return Executor(
        launcher,
        drainer,
        served_by=served_by,
        new_name=lambda: f"{prefix}-{next(names)}",
        clock=time.monotonic,
        patience=patience,
        at=phases.append if phases is not None else lambda _: None,
        **options,
    )


def failing_names(launcher: Launcher) -> set[str]:
    if not isinstance(launcher, MemoryLauncher):
        return set()
    return {name for name, slot in launcher.slots.items() if slot.tp_degree in launcher.failing}


async def change(ours: Executor, nodes: list[int], counts: dict[int, int]) -> Report:
    model = stage2.build_model(nodes, await ours.running(), counts)
    assert solve(model, 30.0).has_solution
    moves: Transition = stage2.read_plan(model)
    async with asyncio.timeout(30):
        return await ours.execute(moves)


async def test_mix_changes_and_changes_back() -> None:
    """The three mixes of the live test: 8 × TP-1, 4 × TP-1 + 2 × TP-2, 2 × TP-4."""
    launcher, drains = MemoryLauncher([8], {1: 8, 2: 0, 4: 0}), Drains()
    ours = executor(launcher, drains)
    for counts in ({1: 4, 2: 2, 4: 0}, {1: 0, 2: 0, 4: 2}, {1: 8, 2: 0, 4: 0}):
        report = await change(ours, [8], counts)
        assert (report.phase, report.reason) == ("done", "")
        assert launcher.counts() == counts
        assert report.lowest >= 4, "half of the slots serve at any time"


async def test_phases_are_told() -> None:
    phases: list[Stage] = []
    launcher = MemoryLauncher([2], {1: 2, 2: 0})
    await change(executor(launcher, Drains(), phases=phases), [2], {1: 0, 2: 1})
    assert list(dict.fromkeys(phases)) == [
        "draining",
        "stopping",
        "stopped",
        "launching",
        "launched",
        "done",
    ]


async def test_launch_that_fails_leaves_what_was_there() -> None:
    launcher = MemoryLauncher([2], {1: 2, 2: 0})
    launcher.failing = {2}
    report = await change(executor(launcher, Drains()), [2], {1: 0, 2: 1})
    assert report.phase == "given_up"
    assert report.reason == "new-2 ended instead of serving: out of memory"
    assert launcher.counts() == {1: 2, 2: 0, 4: 0}


async def test_launch_that_is_refused_leaves_what_was_there() -> None:
    launcher = MemoryLauncher([2], {1: 2, 2: 0})
    launcher.refused = {2}
    report = await change(executor(launcher, Drains()), [2], {1: 0, 2: 1})
    assert (report.phase, report.reason) == ("given_up", "no such image")
    assert launcher.counts() == {1: 2, 2: 0, 4: 0}


async def test_launch_that_is_late_is_ended_and_tried_again() -> None:
    launcher = MemoryLauncher([2], {1: 2, 2: 0})
    ours = executor(launcher, Drains(), patience=Patience(launch_s=0.1), late=frozenset({"new-1"}))
    report = await change(ours, [2], {1: 0, 2: 1})
    assert report.phase == "done"
    assert list(launcher.slots) == ["new-2"]


async def test_instance_that_does_not_get_empty_is_ended() -> None:
    launcher, drains = MemoryLauncher([2], {1: 2, 2: 0}), Drains(never=True)
    ours = executor(launcher, drains, patience=Patience(drain_s=0.1))
    report = await change(ours, [2], {1: 0, 2: 1})
    assert report.phase == "done"
    assert launcher.counts() == {1: 0, 2: 1, 4: 0}
    assert report.lowest == 0
    assert report.pause_s > 0.0, "nobody served in between"


async def test_one_that_was_stopped_for_an_hour_takes_up_where_it_was() -> None:
    launcher, drains = MemoryLauncher([2], {1: 2, 2: 0}), Drains(never=True)
    ours = executor(launcher, drains, patience=Patience(drain_s=60.0))
    stopped_s = 0.0
    ours._clock = lambda: time.monotonic() + stopped_s
    changing = asyncio.create_task(change(ours, [2], {1: 0, 2: 1}))
    async with asyncio.timeout(5):
        while not drains.draining:
            await asyncio.sleep(0.01)
    stopped_s, n_asked = 3600.0, len(drains.asked)
    await asyncio.sleep(LONGEST_LOOK_S + 0.3)
    assert launcher.counts() == {1: 2, 2: 0, 4: 0}, "nothing is ended that is not empty"
    assert len(drains.asked) > n_asked, "the scheduler has forgotten by now, and is asked again"
    drains.never = False
    report = await changing
    assert report.phase == "done"
    assert report.seconds < 60.0


async def test_emptying_is_asked_for_until_the_successor_serves() -> None:
    """The scheduler forgets it otherwise, and would refuse requests while nobody serves."""
    launcher, drains = MemoryLauncher([2], {1: 2, 2: 0}), Drains()
    ours = executor(launcher, drains, patience=Patience(launch_s=2.0), late=frozenset({"new-1"}))
    await change(ours, [2], {1: 0, 2: 1})
    assert drains.asked.count("i0") >= 4
    n_asked = len(drains.asked)
    await asyncio.sleep(0.6)
    assert len(drains.asked) == n_asked


async def test_death_below_the_floor_resumes_what_was_to_end() -> None:
    launcher, drains = MemoryLauncher([8], {1: 8, 2: 0, 4: 0}), Drains(never=True)
    phases: list[Stage] = []
    ours = executor(launcher, drains, floor=4, phases=phases)
    task = asyncio.create_task(change(ours, [8], {1: 0, 2: 0, 4: 2}))
    async with asyncio.timeout(5.0):
        while not drains.draining:
            await asyncio.sleep(0.01)
    staying = next(name for name in launcher.slots if name not in drains.draining)
    await launcher.stop(staying)
    report = await task
    assert report.phase == "cut_short"
    assert staying in report.reason
    assert drains.draining == set()
    assert launcher.counts() == {1: 7, 2: 0, 4: 0}


async def test_launch_that_fails_in_one_place_is_tried_in_another() -> None:
    launcher = MemoryLauncher([4], {1: 2, 2: 0})
    ours = executor(launcher, Drains(), nodes=[4], late=frozenset({"new-1", "new-2"}))
    ours._patience = Patience(launch_s=0.1)
    report = await change(ours, [4], {1: 3, 2: 0})
    assert report.phase == "done"
    assert launcher.slots["new-3"] == Slot(0, (3,))


async def test_without_a_scheduler_that_drains_instances_say_goodbye() -> None:
    launcher = MemoryLauncher([2], {1: 2, 2: 0})
    ours = executor(launcher, Drains(absent=True), patience=Patience(drain_s=0.2))
    report = await change(ours, [2], {1: 0, 2: 1})
    assert report.phase == "done"
    assert launcher.counts() == {1: 0, 2: 1, 4: 0}


@pytest.mark.parametrize("killed_in", ["draining", "stopping", "launching"])
async def test_cancelled_in_any_phase_its_successor_finishes(killed_in: Stage) -> None:
    launcher = MemoryLauncher([4], {1: 4, 2: 0})
    reached = asyncio.Event()

    def at(phase: Stage) -> None:
        if phase == killed_in:
            reached.set()

    first = executor(launcher, Drains())
    first._at = at
    task = asyncio.create_task(change(first, [4], {1: 0, 2: 2}))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    second = executor(launcher, Drains(), prefix="again")
    report = await change(second, [4], {1: 0, 2: 2})
    assert report.phase == "done"
    assert launcher.counts() == {1: 0, 2: 2, 4: 0}


async def test_with_real_processes(tmp_path: Path) -> None:
    launcher = ProcessLauncher(
        tmp_path,
        [sys.executable, "-c", "import time; time.sleep(60)"],
        environ={"PATH": os.environ["PATH"]},
        environ_of=cpu_environ,
        grace_s=2.0,
    )
    ours = executor(launcher, Drains())
    try:
        assert (await change(ours, [4], {1: 2, 2: 1})).phase == "done"
        assert (await change(ours, [4], {1: 0, 2: 2})).phase == "done"
        degrees = [launched.slot.tp_degree for launched in await launcher.running()]
        assert degrees == [2, 2]
    finally:
        for launched in await launcher.running():
            await launcher.stop(launched.name)
