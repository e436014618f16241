"""A stack whose workers are the planner's: they serve, outlive it, and end with the stack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from dilaserve.embedded import free_port
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

MODEL = Path(__file__).parents[2] / "models/tiny"
N_SLOTS = 2
WAIT_S = 90.0


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails."""
    print(f"{name}: {line}")


def worker_pids(home: Path) -> dict[str, int]:
    """Those that run, by name."""
    found = {}
    for path in (home / "instances").glob("*.pid"):
        try:
            found[path.stem] = int(path.read_text())
        except FileNotFoundError:  # it has just ended
            continue
    return found


def is_alive(pid: int) -> bool:
    """A zombie is not: whoever should wait for it may have been killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.1)


async def answer(stack: Stack) -> str:
    body = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": 32, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.endpoints.gateway_url, timeout=60) as client:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(home: Path) -> AsyncIterator[Stack]:
    options = StackOptions(
        home=home, model=MODEL, port=free_port(), n_workers=N_SLOTS, planner="apply"
    )
    async with running_stack(options, environ=os.environ, log=print_line) as stack:
        yield stack
    for pid in worker_pids(home).values():
        assert not is_alive(pid)
    assert not options.instances.exists()


async def test_planner_fills_its_slots_and_they_serve(stack: Stack, home: Path) -> None:
    assert [child.spec.service for child in stack._supervisor.children] == [
        *("nats", "valkey", "scheduler", "predictor", "reconfigurator", "gateway")
    ]
    assert await answer(stack)
    await until("the second worker", lambda: len(worker_pids(home)) == N_SLOTS)


async def test_workers_outlive_their_planner(stack: Stack, home: Path) -> None:
    await until("both workers", lambda: len(worker_pids(home)) == N_SLOTS)
    before = worker_pids(home)
    planner = stack["reconfigurator"]
    planner.signal(signal.SIGKILL)
    await until("its next life", lambda: planner.n_restarts == 1 and planner.phase == "ready")
    assert all(is_alive(pid) for pid in before.values())
    assert await answer(stack)
    victim, survivor = sorted(before)
    os.kill(before[victim], signal.SIGKILL)
    await until(
        "a worker instead of the killed one",
        lambda: victim not in worker_pids(home) and len(worker_pids(home)) == N_SLOTS,
    )
    assert worker_pids(home)[survivor] == before[survivor]


async def test_workers_end_with_a_stack_that_is_killed(tmp_path: Path) -> None:
    environ = {**os.environ, "DILASERVE_HOME": str(tmp_path), "DILASERVE_MODEL": str(MODEL)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dilaserve", "up", "--planner", "apply"),
        *("--port", str(free_port())),
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until("a worker", lambda: bool(worker_pids(tmp_path)))
        pids = [*worker_pids(tmp_path).values(), *children(tmp_path)]
        assert all(is_alive(pid) for pid in pids)
    finally:
        process.kill()
        await process.wait()
    await until("their end", lambda: not any(is_alive(pid) for pid in pids))


def children(home: Path) -> list[int]:
    state = json.loads((home / "stack.json").read_text())
    return [child["pid"] for child in state["children"] if child["pid"] is not None]


async def test_planner_without_anything_to_advise_with_is_refused(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dilaserve", "up", "--planner", "advise"),
        env={"PATH": os.environ["PATH"], "DILASERVE_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    _, complaint = await process.communicate()
    assert process.returncode == 1
    assert b"DILASERVE_PROFILE and DILASERVE_RECORDED_STEPS not set" in complaint
