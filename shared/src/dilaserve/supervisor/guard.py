"""The process that ends the planner's workers when the stack ends, also when the stack is killed.

Workers outlive their planner, so they are nobody's children. The guard ends them once nobody holds
its standard input any more; a killed supervisor does not hold it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from dilaserve.errors import DiLaServeError

__all__ = ["WorkerGuard", "start_guard"]

GUARD = (sys.executable, "-m", "dilaserve_reconfigurator.guard")
"""Takes the planner's folder of instances; says a line when what was left there has ended."""
START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 20.0


class WorkerGuard:
    """Of the instances in `folder`. Made by `start_guard`."""

    def __init__(
        self, process: asyncio.subprocess.Process, folder: Path, argv: Sequence[str]
    ) -> None:
        self._process = process
        self._folder = folder
        self._argv = argv

    async def close(self) -> None:
        """Return when all workers have ended; another guard ends them if this one was killed.
        No-op the second time."""
        await self._close()
        if self._process.returncode:
            self._process = (await start_guard(self._folder, argv=self._argv))._process
            await self._close()

    async def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def start_guard(folder: Path, *, argv: Sequence[str] = GUARD) -> WorkerGuard:
    """Raises DiLaServeError when it does not come up."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        str(folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours, and a hang-up
    )
    guard = WorkerGuard(process, folder, argv)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            is_ready = bool(await process.stdout.readline())
    except TimeoutError:
        is_ready = False
    if not is_ready:
        await guard._close()
        raise DiLaServeError(
            f"the guard of the workers in {folder} did not start; is dilaserve-reconfigurator "
            "installed?"
        )
    return guard
