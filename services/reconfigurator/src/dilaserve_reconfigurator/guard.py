"""Ends the workers of a stack when the stack ends, however that comes: `dilaserve up` holds the
other end of this process's standard input, and the kernel lets go of it for a dead one.

Workers outlive their planner, which is why it does not do this itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from dilaserve_reconfigurator.launchers import LaunchError
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ

__all__ = ["end_workers", "main"]

READY = b"ready\n"
OURS = frozenset({".place", ".pid", ".lock", ".log", ".part"})
SETTLE_S = 0.2
"""A planner that the kernel kills with the stack may have been in the middle of a launch."""


def main() -> None:
    """`python -m dilaserve_reconfigurator.guard FOLDER`: end what an earlier stack left there, say
    that it is done, wait for the end of the input, and end what runs then."""
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are for the stack, which then lets go
    asyncio.run(end_workers(folder))
    os.write(sys.stdout.fileno(), READY)
    sys.stdin.buffer.read()
    time.sleep(SETTLE_S)
    asyncio.run(end_workers(folder))


async def end_workers(folder: Path) -> None:
    """End all that were launched from `folder`, by force if need be, and remove it, but for files
    that are not the planner's. What cannot be ended is said, and keeps its files."""
    launcher = ProcessLauncher(folder, [], environ={}, environ_of=cpu_environ)
    given_up: set[str] = set()
    while names := set(launcher.names()) - given_up:
        ends = await asyncio.gather(*map(launcher.stop, names), return_exceptions=True)
        for name, end in zip(names, ends, strict=True):
            if isinstance(end, LaunchError | OSError):
                sys.stderr.write(f"guard: {name} is not ended: {end}\n")
                given_up.add(name)
            elif end is not None:
                raise end
    if not given_up:
        _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in OURS or path.name == "wanted.json":
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):  # others have files there
        folder.rmdir()


if __name__ == "__main__":
    main()
