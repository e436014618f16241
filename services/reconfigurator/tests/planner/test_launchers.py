"""The contract of launchers, on each of them; and what only one of them promises."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dilaserve_reconfigurator.launchers import Launched, Launcher, LaunchError
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ, cuda_environ
from dilaserve_reconfigurator.stage2 import Slot

ONE, TWO = Slot(0, (0,)), Slot(0, (2, 3))
SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
SAYS = (
    "import os, sys; print(*(os.environ.get(name) for name in "
    "('DILASERVE_WORKER_NAME', 'DILASERVE_TP_DEGREE', 'CUDA_VISIBLE_DEVICES')))"
)

Make = Callable[[str], Launcher]
"""A launcher whose instances run this Python script; each call is a new life of the same."""


@pytest.fixture(params=["process"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    lives: list[Launcher] = []

    def build(script: str) -> Launcher:
        launcher = ProcessLauncher(
            tmp_path / "instances",
            [sys.executable, "-c", script],
            environ={"PATH": os.environ["PATH"]},
            environ_of=cuda_environ,
            grace_s=0.5,
        )
        lives.append(launcher)
        return launcher

    yield build
    for launched in await build(SLEEP).running():
        await lives[-1].stop(launched.name)
    for launcher in lives:
        await launcher.stop("a")  # also so that its children are no zombies
        await launcher.stop("b")


async def test_what_was_launched_runs_until_it_is_stopped(make: Make) -> None:
    launcher = make(SLEEP)
    await launcher.launch("b", TWO)
    await launcher.launch("a", ONE)
    assert await launcher.running() == [Launched("a", ONE), Launched("b", TWO)]
    await launcher.stop("a")
    assert await launcher.running() == [Launched("b", TWO)]
    await launcher.stop("a")


async def test_its_next_life_knows_what_runs(make: Make) -> None:
    await make(SLEEP).launch("a", TWO)
    again = make(SLEEP)
    assert await again.running() == [Launched("a", TWO)]
    await again.stop("a")
    assert await again.running() == []


async def test_what_ended_in_between_does_not_run(make: Make) -> None:
    first = make("pass")
    await first.launch("a", ONE)
    await first.wait("a")
    assert await make(SLEEP).running() == []


async def test_wait_tells_of_the_end(make: Make) -> None:
    launcher = make("import sys; sys.exit('out of memory')")
    await launcher.launch("a", ONE)
    async with asyncio.timeout(20):
        assert await launcher.wait("a") == "exit code 1; out of memory"
    assert await launcher.running() == []


async def test_wait_for_nobody_ends_at_once(make: Make) -> None:
    async with asyncio.timeout(5):
        assert await make(SLEEP).wait("nobody")


async def test_name_that_is_taken_is_refused_and_free_again_later(make: Make) -> None:
    launcher = make(SLEEP)
    await launcher.launch("a", ONE)
    with pytest.raises(LaunchError, match="an instance 'a' runs already"):
        await launcher.launch("a", TWO)
    await launcher.stop("a")
    await launcher.launch("a", TWO)
    assert await launcher.running() == [Launched("a", TWO)]


async def test_instance_that_does_not_end_is_ended_by_force(make: Make) -> None:
    launcher = make(STUBBORN)
    await launcher.launch("a", ONE)
    await asyncio.sleep(0.5)
    async with asyncio.timeout(20):
        await launcher.stop("a")
    assert await launcher.running() == []


async def test_instance_is_told_its_name_degree_and_gpus(make: Make, tmp_path: Path) -> None:
    launcher = make(SAYS)
    await launcher.launch("worker-7", TWO)
    assert (await launcher.wait("worker-7")).endswith("worker-7 2 2,3")


async def test_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path, ["/no/such/command"], environ={}, environ_of=cpu_environ)
    await launcher.launch("a", ONE)
    assert "/no/such/command" in await launcher.wait("a")


async def test_instances_survive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ\n"
        "from dilaserve_reconfigurator.stage2 import Slot\n"
        "async def main():\n"
        f"    launcher = ProcessLauncher(Path({str(tmp_path)!r}),\n"
        f"        [sys.executable, '-c', {SLEEP!r}], environ={{}}, environ_of=cpu_environ)\n"
        "    await launcher.launch('a', Slot(0, (0, 1)))\n"
        "    print('launched', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"launched\n"
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    launcher = ProcessLauncher(tmp_path, [], environ={}, environ_of=cpu_environ)
    assert await launcher.running() == [Launched("a", Slot(0, (0, 1)))]
    await launcher.stop("a")
    assert await launcher.running() == []
