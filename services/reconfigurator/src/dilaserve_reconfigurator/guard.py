"""Ends the workers of a stack when the stack ends, however that comes: `dilaserve up` holds the
other end of this process's standard input, and the kernel lets go of it for a dead one.

Workers outlive their planner, which is why it does not do this itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ

__all__ = ["end_workers", "main"]

READY = b"ready\n"
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
    """End all that were launched from `folder`, by force if need be, and remove it."""
    launcher = ProcessLauncher(folder, [], environ={}, environ_of=cpu_environ)
    while launched := await launcher.running():
        await asyncio.gather(*(launcher.stop(each.name) for each in launched))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
