"""`dilaserve up --detach`: the same command again, as a process of its own session."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.state import StackState, refuse_second, running_state

POLL_S = 0.1
N_LINES = 20
LOG_NAME = "up.log"
DETACH_FLAGS = ("--detach", "-d", "--sample")


def start_in_background(home: Path) -> StackState:
    """Run this command line again without `--detach`, and wait until its stack is ready.
    Raises DiLaServeError with the end of its log when it ends instead, or when one runs already."""
    refuse_second(home)  # whose log this one would empty
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / LOG_NAME
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dilaserve", *_without_detach(sys.argv[1:])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _wait_ready(process, home, log_path)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _wait_ready(process: subprocess.Popen[bytes], home: Path, log_path: Path) -> StackState:
    while process.poll() is None:
        state = running_state(home)
        if state and state.supervisor_pid == process.pid and state.phase == "ready":
            return state
        time.sleep(POLL_S)
    tail = "\n".join(_last_words(log_path.read_text(errors="replace").splitlines()))
    raise DiLaServeError(f"the stack did not come up; {log_path} ends:\n{tail}")


def _last_words(lines: list[str]) -> list[str]:
    """From the command's own error on, which comes after the children's last lines."""
    errors = [number for number, line in enumerate(lines) if line.startswith("dilaserve: ")]
    return lines[errors[-1] if errors else -N_LINES :][:N_LINES]


def _without_detach(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument not in DETACH_FLAGS]
