"""The supervisor over small scripts instead of services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.child import Child, ChildSpec
from dilaserve.supervisor.restarts import RestartPolicy
from dilaserve.supervisor.supervisor import Supervisor

QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, max_failures=3)
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
WAIT_S = 20.0


class Log:
    """Collects (name, line)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def write(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.lines if who == name]


@asynccontextmanager
async def supervising(log: Log) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(policy=QUICK, log=log.write, changed=lambda: None)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def spec(
    name: str,
    script: str,
    *,
    service: str = "sleeper",
    first_env: dict[str, str] | None = None,
    log: Log | None = None,
) -> ChildSpec:
    """A child that is ready as soon as it has printed `up`."""

    async def probe(_pid: int) -> bool:
        return log is None or "up" in log.of(name)

    return ChildSpec(
        name=name,
        service=service,
        argv=(sys.executable, "-c", script),
        env=dict(os.environ),
        probe=probe,
        first_env=first_env or {},
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def test_killed_child_is_started_again() -> None:
    log = Log()
    async with supervising(log) as supervisor:
        (child,) = supervisor.start([spec("a", SLEEPER, log=log)])
        await supervisor.wait_ready([child], timeout_s=WAIT_S)
        for n_restarts in (1, 2, 3, 4):
            first = child.pid
            child.signal(signal.SIGKILL)
            await until(lambda first=first: child.pid not in (None, first))  # type: ignore[misc]
            await supervisor.wait_ready([child], timeout_s=WAIT_S)
            assert child.n_restarts == n_restarts
    assert "a was killed by SIGKILL; starting it again" in log.of("supervisor")


async def test_child_that_never_gets_ready_is_given_up() -> None:
    log = Log()
    async with supervising(log) as supervisor:
        children = supervisor.start([spec("bad", "import sys; sys.exit('no such model')", log=log)])
        with pytest.raises(DiLaServeError, match=r"bad does not start.*\n.*no such model"):
            await supervisor.wait_ready(children, timeout_s=WAIT_S)
        await supervisor.wait()
    assert children[0].n_restarts == QUICK.max_failures - 1
    assert "3 times in a row; given up" in log.of("supervisor")[-1]


REFUSING = "import sys; sys.exit('dilaserve-sleeper: ' + {words})"


async def test_child_that_refuses_twice_in_the_same_words_is_given_up() -> None:
    log = Log()
    async with supervising(log) as supervisor:
        refusing = REFUSING.format(words="'no such device; use cpu'")
        children = supervisor.start([spec("bad", refusing, log=log)])
        with pytest.raises(DiLaServeError, match="no such device; use cpu"):
            await supervisor.wait_ready(children, timeout_s=WAIT_S)
        await supervisor.wait()
    assert children[0].n_restarts == 1
    assert "2 times in a row; given up" in log.of("supervisor")[-1]


async def test_child_that_refuses_in_other_words_each_time_is_tried_again() -> None:
    log = Log()
    async with supervising(log) as supervisor:
        refusing = REFUSING.format(words="str(__import__('os').getpid())")
        children = supervisor.start([spec("bad", refusing, log=log)])
        await supervisor.wait()
    assert children[0].n_restarts == QUICK.max_failures - 1


async def test_child_that_served_before_is_tried_again_whatever_it_says(tmp_path: Path) -> None:
    log = Log()
    script = (
        f"import pathlib, sys, time; marker = pathlib.Path({str(tmp_path / 'm')!r})\n"
        "if marker.exists(): sys.exit('dilaserve-sleeper: the bus is gone')\n"
        "marker.touch(); print('up', flush=True); time.sleep(600)"
    )
    async with supervising(log) as supervisor:
        (child,) = supervisor.start([_ready_once(spec("a", script, log=log))])
        await supervisor.wait_ready([child], timeout_s=WAIT_S)
        child.signal(signal.SIGKILL)
        await supervisor.wait()
    assert child.n_restarts == QUICK.max_failures


def _ready_once(made: ChildSpec) -> ChildSpec:
    """Ready in its first life only."""
    pids: list[int] = []

    async def probe(pid: int) -> bool:
        pids.append(pid)
        return pid == pids[0] and await made.probe(pid)

    return replace(made, probe=probe)


async def test_program_that_does_not_exist_is_given_up() -> None:
    log = Log()
    async with supervising(log) as supervisor:
        missing = ChildSpec(
            name="none", service="none", argv=("/nonexistent",), env={}, probe=_never_ready
        )
        children = supervisor.start([missing])
        with pytest.raises(DiLaServeError, match="cannot be started"):
            await supervisor.wait_ready(children, timeout_s=WAIT_S)


async def test_waiting_for_a_silent_child_ends() -> None:
    async with supervising(Log()) as supervisor:
        silent = ChildSpec(
            name="silent",
            service="s",
            argv=(sys.executable, "-c", SLEEPER),
            env={},
            probe=_never_ready,
        )
        with pytest.raises(DiLaServeError, match="silent not ready after 0 s"):
            await supervisor.wait_ready(supervisor.start([silent]), timeout_s=0.2)


async def test_stop_ends_the_last_service_first() -> None:
    log = Log()
    names = ["nats", "worker-1", "worker-2", "gateway"]
    on_term = (
        "import signal, sys, time\n"
        "def end(*_):\n  print('bye', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
    )
    async with supervising(log) as supervisor:
        children = supervisor.start(
            spec(name, on_term, service=name.partition("-")[0], log=log) for name in names
        )
        await supervisor.wait_ready(children, timeout_s=WAIT_S)
    goodbyes = [name for name, line in log.lines if line == "bye"]
    assert goodbyes[0] == "gateway"
    assert set(goodbyes[1:3]) == {"worker-1", "worker-2"}
    assert goodbyes[3] == "nats"
    assert [child.phase for child in children] == ["stopped"] * 4


async def test_child_that_ignores_sigterm_is_killed() -> None:
    log = Log()
    child = Child(
        spec("stubborn", STUBBORN, log=log), policy=QUICK, log=log.write, changed=lambda: None
    )
    child.start()
    await until(lambda: child.phase == "ready")
    pid = child.pid
    assert pid is not None
    await child.stop(timeout_s=0.1)
    assert not is_alive(pid)
    assert log.of("supervisor") == ["stubborn ignored SIGTERM for 0 s"]


async def test_first_environment_is_used_once() -> None:
    log = Log()
    script = "import os, sys; print('armed' if 'CRASH' in os.environ else 'safe', flush=True)"
    async with supervising(log) as supervisor:
        supervisor.start([spec("a", script, first_env={"CRASH": "1"}, log=log)])
        await until(lambda: len(log.of("a")) >= 2)
    assert log.of("a")[:2] == ["armed", "safe"]


async def test_lines_of_any_length_are_forwarded_whole() -> None:
    log = Log()
    script = "import sys; sys.stdout.write('x' * 300_000 + '\\nlast words')"
    async with supervising(log) as supervisor:
        supervisor.start([spec("a", script)])
        await until(lambda: len(log.of("a")) >= 2)
    assert [len(line) for line in log.of("a")[:2]] == [300_000, len("last words")]


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_supervisor import Log, SLEEPER, spec, supervising

async def main():
    log = Log()
    async with supervising(log) as supervisor:
        children = supervisor.start([spec("a", SLEEPER, log=log)])
        await supervisor.wait_ready(children, timeout_s=20)
        print(children[0].pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert is_alive(child_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not is_alive(child_pid)))


@pytest.mark.parametrize(
    ("n_failures", "delay_s"), [(0, 0.1), (1, 0.1), (2, 0.2), (4, 0.8), (5, None)]
)
def test_delays_double_until_giving_up(n_failures: int, delay_s: float | None) -> None:
    assert RestartPolicy().delay_s(n_failures) == delay_s


def test_delay_is_bounded() -> None:
    policy = RestartPolicy(max_failures=100)
    assert policy.delay_s(50) == policy.longest_delay_s


async def _never_ready(_pid: int) -> bool:
    return False
