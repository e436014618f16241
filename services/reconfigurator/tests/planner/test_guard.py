"""Workers end with the stack, also with one that is killed, and not with their planner."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dilaserve.supervisor import guard as supervisor_guard
from dilaserve_reconfigurator.guard import end_workers
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ
from dilaserve_reconfigurator.testing import ONE, SLEEP, TWO

GUARD = "dilaserve_reconfigurator.guard"


def launcher(folder: Path) -> ProcessLauncher:
    command = [sys.executable, "-c", SLEEP]
    return ProcessLauncher(folder, command, environ={}, environ_of=cpu_environ)


async def start_guard(folder: Path) -> asyncio.subprocess.Process:
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", GUARD, str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert guard.stdout is not None
    assert await guard.stdout.readline() == b"ready\n"
    return guard


async def test_workers_end_when_the_input_does(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    guard = await start_guard(folder)
    ours = launcher(folder)
    await ours.launch("a", ONE)
    await ours.launch("b", TWO)
    (folder / "wanted.json").write_text("{}")
    assert len(await ours.running()) == 2
    assert guard.returncode is None
    await guard.communicate(b"")
    assert guard.returncode == 0
    assert not folder.exists(), "the next stack begins anew"
    for name in ("a", "b"):
        await ours.wait(name)
        await ours.stop(name)


async def test_input_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    holder = (
        "import subprocess, sys, time\n"
        f"guard = subprocess.Popen([sys.executable, '-m', '{GUARD}', {str(folder)!r}],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)\n"
        "print(guard.stdout.readline().decode(), end='', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", holder, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    ours = launcher(folder)
    await ours.launch("a", ONE)
    process.kill()
    async with asyncio.timeout(30):
        await ours.wait("a")
        while folder.exists():
            await asyncio.sleep(0.05)
    await process.communicate()
    await ours.stop("a")


async def test_what_an_earlier_stack_left_is_ended_first(tmp_path: Path) -> None:
    ours = launcher(tmp_path)
    await ours.launch("a", ONE)
    guard = await start_guard(tmp_path)
    async with asyncio.timeout(5):
        await ours.wait("a")
    await ours.stop("a")
    await guard.communicate(b"")


async def test_killed_guard_has_a_successor_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    guard = await supervisor_guard.start_guard(folder)
    ours = launcher(folder)
    await ours.launch("a", ONE)
    guard._process.kill()
    await guard._process.wait()
    assert await ours.running(), "the guard is not what it lives by"
    await guard.close()
    assert not folder.exists()
    await ours.wait("a")
    await guard.close()
    await ours.stop("a")


async def test_worker_is_ended_whatever_its_place_says(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    ours = launcher(folder)
    await ours.launch("a", ONE)
    (folder / "a.place").write_text("{")
    while not (folder / "a.pid").exists():
        await asyncio.sleep(0.01)
    await end_workers(folder)
    assert not folder.exists()
    await ours.stop("a")


async def test_nobody_else_is_ended_and_the_rest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """-1 would be everybody."""
    folder = tmp_path / "instances"
    ours = launcher(folder)
    await ours.launch("a", ONE)
    await ours.launch("b", TWO)
    while not all((folder / f"{name}.pid").exists() for name in "ab"):
        await asyncio.sleep(0.01)
    (folder / "a.pid").write_text("-1\n")
    await end_workers(folder)
    assert "a is not ended" in capsys.readouterr().err
    assert [each.name for each in await ours.running()] == ["a"]
    for name in ("a", "b"):
        await ours.stop(name)  # it knows its child


async def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("an old log")
    (tmp_path / "thesis.txt").write_text("of the user")
    (tmp_path / "d.place").mkdir()
    await end_workers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["d.place", "thesis.txt"]
