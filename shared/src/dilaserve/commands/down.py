"""`dilaserve down`: ends the stack that runs here."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from dilaserve.addresses import stack_home
from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.state import running_state

POLL_S = 0.05


def down(
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 30.0,
) -> None:
    """End the stack that was started here."""
    home = stack_home(os.environ)
    state = running_state(home)
    if state is None:
        typer.echo(f"no stack runs in {home}")
        return
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while running_state(home) is not None:
        if time.monotonic() > deadline:
            raise DiLaServeError(
                f"the supervisor {state.supervisor_pid} has not ended after {timeout_s:.0f} s; "
                f"kill -9 {state.supervisor_pid} ends it and all its children at once"
            )
        time.sleep(POLL_S)
    typer.echo("stopped")
