"""The contract of launchers on processes; and what only those promise."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dilaserve_reconfigurator.launchers import Launched, Launcher, LaunchError
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ, cuda_environ
from dilaserve_reconfigurator.stage2 import Slot
from dilaserve_reconfigurator.testing import ONE, SLEEP, TWO, LauncherContract, Make


def process(folder: Path) -> ProcessLauncher:
    command = [sys.executable, "-c", SLEEP]
    return ProcessLauncher(folder, command, environ={}, environ_of=cpu_environ, grace_s=0.5)


GPUS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
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


class TestProcess(LauncherContract):
    """Processes of this machine."""

    async def test_instance_sees_its_gpus(self, make: Make) -> None:
        launcher = make(GPUS)
        await launcher.launch("a", TWO)
        assert (await launcher.wait("a")).endswith("; 2,3")


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


PLACES = [b"", b"{", b"\xff", b'{"node":-1,"gpus":[0]}', b'{"node":0,"gpus":[]}']


@pytest.mark.parametrize("place", PLACES)
async def test_no_gpu_is_given_away_while_a_place_cannot_be_read(
    tmp_path: Path, place: bytes
) -> None:
    ours = process(tmp_path)
    await ours.launch("a", ONE)
    (tmp_path / "a.place").write_bytes(place)
    with pytest.raises(LaunchError, match=r"a\.place does not say where 'a' is"):
        await ours.running()
    with pytest.raises(LaunchError, match=r"a\.place does not say where 'a' is"):
        await ours.launch("b", TWO)
    await ours.stop("a")
    assert await ours.running() == []


@pytest.mark.parametrize("pid", ["", "x", "0", "1", "-1", "99999999999999999999"])
async def test_signals_go_to_nobody_else(tmp_path: Path, pid: str) -> None:
    first = process(tmp_path)
    await first.launch("a", ONE)
    while not (tmp_path / "a.pid").exists():
        await asyncio.sleep(0.01)
    (tmp_path / "a.pid").write_text(pid)
    with pytest.raises(LaunchError, match="instead of the process id of 'a'"):
        await process(tmp_path).stop("a")
    assert [each.name for each in await first.running()] == ["a"]
    await first.stop("a")


async def test_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    ours = process(tmp_path / "instances")
    (tmp_path / "instances").rmdir()
    await ours.launch("a", ONE)
    assert [each.name for each in await ours.running()] == ["a"]
    await ours.stop("a")


async def test_folder_that_cannot_be_used_fails_the_launch(tmp_path: Path) -> None:
    ours = process(tmp_path / "instances")
    (tmp_path / "instances").rmdir()
    (tmp_path / "instances").write_text("a file")
    with pytest.raises(LaunchError, match="'a' cannot be started"):
        await ours.launch("a", ONE)
