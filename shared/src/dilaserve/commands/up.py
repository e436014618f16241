"""`dilaserve up`: the whole stack on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dilaserve.addresses import CliSettings, stack_home
from dilaserve.commands.background import start_in_background
from dilaserve.commands.forward import LineForwarder
from dilaserve.commands.options import command_name
from dilaserve.commands.sample import SAMPLE_LENGTH, SAMPLE_PROMPT, stream_sample
from dilaserve.errors import DiLaServeError
from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.settings import MOST_THREADS, load, variable
from dilaserve.supervisor.plan import LOOPBACK, PlannerRole, StackOptions
from dilaserve.supervisor.stack import running_stack
from dilaserve.supervisor.state import StackState

logger = logging.getLogger(__name__)

MOST_WORKERS = 256
"""Each is a process, and so is each rank of a TP degree."""

Workers = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_WORKERS, help="Workers; with --planner apply those to begin with."
    ),
]
Planner = Annotated[
    PlannerRole | None,
    typer.Option(help="Run the planner: it proposes, or also launches and ends the workers."),
]
Degree = Annotated[
    int,
    typer.Option(
        "--tp", min=1, max=MOST_WORKERS, help="TP degree of the workers, with --planner apply."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=MOST_THREADS, help="Torch threads a worker.")
]
RunAhead = Annotated[
    str | None, typer.Option(help="How far workers go by themselves: block, or N steps.")
]
PLANNED_WITH = (variable("profile"), variable("recorded_steps"))


def up(
    workers: Workers = 1,
    planner: Planner = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default: the bundled tiny model.")
    ] = None,
    tp: Degree = 1,
    threads: Threads = None,
    cache: Annotated[CacheMode | None, typer.Option(help="KV cache of the workers.")] = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy.")] = None,
    run_ahead: RunAhead = None,
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = LOOPBACK,
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway; default: first free one from 8000.")
    ] = None,
    nats_url: Annotated[str | None, typer.Option(help="Use this NATS, start none.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Use this Redis, start none.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Stream one answer as proof.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; `dilaserve down` ends it.")
    ] = False,
) -> None:
    """Start the whole stack here, and keep it running."""
    settings = load(CliSettings, os.environ)
    _check_planner(planner or settings.planner, tp, os.environ)
    options = StackOptions(
        home=stack_home(os.environ),
        model=find_model(model, os.environ),
        n_workers=workers,
        tp_degree=tp,
        planner=planner or settings.planner,
        worker_device="cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu",
        threads=threads,
        cache_mode=cache,
        policy=policy,
        run_ahead=run_ahead,
        host=host,
        port=port,
        nats_url=nats_url or settings.nats_url or None,
        redis_url=redis_url or settings.redis_url or None,
    )
    if detach:
        state = start_in_background(options.home)
        typer.echo(describe(state, detached=True))
        if sample:
            asyncio.run(stream_sample(state.gateway_url))
        return
    with suppress(asyncio.CancelledError):
        asyncio.run(_run(options, sample))


def describe(state: StackState, *, detached: bool = False) -> str:
    """Where the stack listens, and what to do with it."""
    name = command_name()
    question = f"{name} generate '{SAMPLE_PROMPT}'"
    return "\n".join(
        [
            "",
            f"  gateway   {state.gateway_url}/v1   (OpenAI-compatible)",
            f"  play      {state.gateway_url}/   (in a browser)",
            f"  metrics   {state.gateway_url}/metrics",
            f"  nats      {state.nats_url}",
            f"  redis     {state.redis_url}",
            f"  model     {state.model}",
            "",
            f"  try       {question} --max-tokens {SAMPLE_LENGTH} --watch",
            f"  look      {name} status   ·   {name} sub 'dlm.>'",
            f"  end       {'Ctrl-C or ' if not detached else ''}{name} down",
            "",
        ]
    )


async def _run(options: StackOptions, sample: bool) -> None:
    forwarder = LineForwarder()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[forwarder.handler()])
    _end_on_signals()
    async with running_stack(options, environ=os.environ, log=forwarder.write) as stack:
        typer.echo(describe(stack.state))
        if sample:
            await stream_sample(stack.endpoints.gateway_url)
        await stack.wait()


def _end_on_signals() -> None:
    """A first signal ends the stack in order; a second one leaves at once, and the kernel ends
    the children with us."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(other)
        task.cancel()
        logger.warning("%s: stopping", number.name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)


def _check_planner(planner: PlannerRole, tp: int, environ: Mapping[str, str]) -> None:
    if tp != 1 and planner != "apply":
        raise DiLaServeError(
            f"--tp {tp} is for the planner's workers; add --planner apply, or set "
            f"DILASERVE_TP_DEGREE={tp} for those of the supervisor"
        )
    unset = [name for name in PLANNED_WITH if not environ.get(name)]
    if planner == "advise" and unset:
        raise DiLaServeError(
            f"--planner advise: {' and '.join(unset)} not set, so there is nothing to advise; set "
            "them (`dilaserve profile`, `dilaserve record`), or use --planner apply, which then "
            "keeps the mix"
        )
