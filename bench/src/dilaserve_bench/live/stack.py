"""The stack under test: one worker on a core of its own, everything else on another."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

__all__ = ["MAX_BATCH_TOKENS", "one_worker_stack", "settings_of"]

MAX_BATCH_TOKENS = 2048
"""Room for a dozen requests of the tiny model."""
WARNINGS = ("WARNING", "ERROR", "CRITICAL")


def settings_of(environ: Mapping[str, str], policy: str) -> dict[str, str]:
    """Environment of the stack's services; the twin reads the same. Weights are not packed: the
    engine is to be what limits the stack, not the core on which all the rest runs."""
    ours = {
        "policy": policy,
        "cache_mode": "dual",
        "queue_limit": 10**6,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "pack_weights": "off",
    }
    return {**environ, **{variable(name): str(value) for name, value in ours.items()}}


@asynccontextmanager
async def one_worker_stack(
    model: Path, environ: Mapping[str, str], *, worker_core: int
) -> AsyncIterator[Stack]:
    """Servers, scheduler, predictor, gateway and one worker, ready to serve."""
    env = {**environ, variable("cpu_affinity"): str(worker_core)}
    with tempfile.TemporaryDirectory() as home:
        options = StackOptions(home=Path(home), model=model, port=free_port(), threads=1)
        async with running_stack(options, environ=env, log=_print_warning) as stack:
            yield stack


def _print_warning(name: str, line: str) -> None:
    if name == "supervisor" or any(word in line for word in WARNINGS):
        sys.stderr.write(f"{name}: {line}\n")
