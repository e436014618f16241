"""The planner's process: settings → bus, monitor and planner, until a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from dilaserve.bus.nats import connect_nats
from dilaserve.errors import DiLaServeError
from dilaserve.process import run_while_open
from dilaserve.settings import load
from dilaserve.telemetry import Telemetry
from dilaserve_reconfigurator.members import Members
from dilaserve_reconfigurator.monitor import Monitor
from dilaserve_reconfigurator.planner import Planner, PlannerOptions
from dilaserve_reconfigurator.record import Plans
from dilaserve_reconfigurator.service import Clocks, Identity, ReconfiguratorService
from dilaserve_reconfigurator.settings import ReconfiguratorSettings
from dilaserve_reconfigurator.whatif import parse_nodes

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Propose plans until SIGTERM or SIGINT (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(ReconfiguratorSettings, os.environ)
        options, nodes = settings.options(), parse_nodes(settings.nodes)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, options, nodes))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-reconfigurator: {error}\n")
        sys.exit(1)


async def _serve(
    settings: ReconfiguratorSettings, options: PlannerOptions, nodes: tuple[int, ...]
) -> None:
    service_id = f"reconfigurator-{secrets.token_hex(2)}"
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    closed = asyncio.Event()
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(
            service="reconfigurator", service_id=service_id, settings=settings
        )
        stack.callback(telemetry.close)
        bus = await connect_nats(
            settings.nats_url,
            name=service_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        service = ReconfiguratorService(
            bus,
            Planner(options, lambda: f"plan-{secrets.token_hex(3)}"),
            Monitor(window_s=settings.plan_window_s, slo_s=settings.slo_ms / 1000),
            Members(nodes, settings.model_name),
            Plans(Path(settings.plans_dir)),
            Identity(service_id, os.getpid(), socket.gethostname()),
            telemetry=telemetry,
            clocks=Clocks(time.monotonic, time.time),
            every_s=settings.plan_every_s,
        )
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, service.stop, number.name)
        await run_while_open(service.run(), closed)


if __name__ == "__main__":
    main()
