"""What every launcher promises, as tests: derive a class from it with a fixture `make`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dilaserve_reconfigurator.launchers import Launched, Launcher, LaunchError
from dilaserve_reconfigurator.slots import Slot

__all__ = ["ONE", "SLEEP", "TWO", "LauncherContract", "Make"]

ONE, TWO = Slot(0, (0,)), Slot(0, (2, 3))
SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
SAYS = (
    "import os; print('loading'); "
    "print(*(os.environ[f'DILASERVE_{name}'] for name in ('WORKER_NAME', 'TP_DEGREE')))"
)
START_S = 1.5
"""Long enough for a script to begin."""

Make = Callable[[str], Launcher]
"""A launcher whose instances run this Python script and see GPUs, with half a second to end by
themselves. Each call is a new life of the same launcher. Whatever runs ends with the test."""


class LauncherContract:
    """See Launcher."""

    async def test_what_was_launched_runs_until_it_is_stopped(self, make: Make) -> None:
        launcher = make(SLEEP)
        await launcher.launch("b", TWO)
        await launcher.launch("a", ONE)
        assert await launcher.running() == [Launched("a", ONE), Launched("b", TWO)]
        await launcher.stop("a")
        assert await launcher.running() == [Launched("b", TWO)]
        await launcher.stop("a")

    async def test_its_next_life_knows_what_runs(self, make: Make) -> None:
        await make(SLEEP).launch("a", TWO)
        again = make(SLEEP)
        assert await again.running() == [Launched("a", TWO)]
        await again.stop("a")
        assert await again.running() == []

    async def test_its_next_life_stops_without_having_looked(self, make: Make) -> None:
        await make(SLEEP).launch("a", TWO)
        await make(SLEEP).stop("a")
        assert await make(SLEEP).running() == []

    async def test_what_ended_in_between_does_not_run(self, make: Make) -> None:
        first = make("pass")
        await first.launch("a", ONE)
        await first.wait("a")
        assert await make(SLEEP).running() == []

    async def test_wait_tells_of_the_end(self, make: Make) -> None:
        launcher = make("import sys; print('loading', file=sys.stderr); sys.exit('out of memory')")
        await launcher.launch("a", ONE)
        async with asyncio.timeout(20):
            assert await launcher.wait("a") == "exit code 1; out of memory"
        assert await launcher.running() == []

    async def test_wait_for_nobody_ends_at_once(self, make: Make) -> None:
        async with asyncio.timeout(5):
            assert await make(SLEEP).wait("nobody")

    async def test_wait_for_what_is_stopped_ends(self, make: Make) -> None:
        launcher = make(SLEEP)
        await launcher.launch("a", ONE)
        waiting = asyncio.create_task(launcher.wait("a"))
        await launcher.stop("a")
        async with asyncio.timeout(20):
            assert await waiting

    async def test_name_that_is_taken_is_refused_and_free_again_later(self, make: Make) -> None:
        launcher = make(SLEEP)
        await launcher.launch("a", ONE)
        with pytest.raises(LaunchError, match="an instance 'a' runs already"):
            await launcher.launch("a", TWO)
        await launcher.stop("a")
        await launcher.launch("a", TWO)
        assert await launcher.running() == [Launched("a", TWO)]

    async def test_name_of_one_that_has_ended_is_free(self, make: Make) -> None:
        launcher = make("pass")
        await launcher.launch("a", ONE)
        await launcher.wait("a")
        await launcher.launch("a", ONE)
        await launcher.wait("a")

    async def test_gpu_that_is_taken_is_refused_and_free_again_later(self, make: Make) -> None:
        launcher = make(SLEEP)
        await launcher.launch("a", TWO)
        with pytest.raises(LaunchError, match=r"'a' has GPUs 2, 3 of node 0; stop that one first"):
            await launcher.launch("b", Slot(0, (3,)))
        assert await launcher.running() == [Launched("a", TWO)]
        await launcher.stop("a")
        await launcher.launch("b", Slot(0, (3,)))

    async def test_instance_that_does_not_end_is_ended_by_force(self, make: Make) -> None:
        launcher = make(STUBBORN)
        await launcher.launch("a", ONE)
        await asyncio.sleep(START_S)
        async with asyncio.timeout(20):
            await launcher.stop("a")
        assert await launcher.running() == []

    async def test_instance_is_told_its_name_and_its_degree(self, make: Make) -> None:
        launcher = make(SAYS)
        await launcher.launch("worker-7", TWO)
        assert await launcher.wait("worker-7") == "exit code 0; worker-7 2"
        await launcher.stop("worker-7")
