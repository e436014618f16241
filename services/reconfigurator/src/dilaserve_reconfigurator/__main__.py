"""The planner's process: settings → bus, monitor and planner, until a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from dilaserve.bus import Bus
from dilaserve.bus.nats import connect_nats
from dilaserve.crashpoints import CrashPoint, CrashPoints
from dilaserve.errors import DiLaServeError
from dilaserve.process import Identity, run_while_open
from dilaserve.settings import load
from dilaserve.telemetry import Telemetry
from dilaserve_reconfigurator.alone import only_planner
from dilaserve_reconfigurator.draining import BusDrainer
from dilaserve_reconfigurator.execution import Patience
from dilaserve_reconfigurator.executor import Executor, Stage
from dilaserve_reconfigurator.holding import HoldingPlanner
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.launching import build_launcher
from dilaserve_reconfigurator.members import Members
from dilaserve_reconfigurator.monitor import Monitor
from dilaserve_reconfigurator.planner import Planner, PlannerOptions
from dilaserve_reconfigurator.record import Plans
from dilaserve_reconfigurator.service import Clocks, ReconfiguratorService
from dilaserve_reconfigurator.settings import ReconfiguratorSettings, degrees_of
from dilaserve_reconfigurator.silence import Silence
from dilaserve_reconfigurator.spare import only
from dilaserve_reconfigurator.whatif import parse_mix, parse_nodes

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CRASH_POINTS: dict[Stage, CrashPoint] = {
    "wanted": "reconfigurator.wanted",
    "draining": "reconfigurator.draining",
    "stopping": "reconfigurator.stopping",
    "stopped": "reconfigurator.stopped",
    "launching": "reconfigurator.launching",
    "launched": "reconfigurator.launched",
    "undoing": "reconfigurator.undoing",
    "given_up": "reconfigurator.given_up",
    "done": "reconfigurator.done",
}
HOLD_S = 10.0
"""For so long the scheduler empties an instance without being asked again."""


def main() -> None:
    """Propose plans until SIGTERM or SIGINT (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(ReconfiguratorSettings, os.environ)
        options, nodes = settings.options(), parse_nodes(settings.nodes)
        settings.check_floor(sum(nodes))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, options, nodes))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-reconfigurator: {error}\n")
        sys.exit(1)


async def _serve(
    settings: ReconfiguratorSettings, options: PlannerOptions | None, nodes: tuple[int, ...]
) -> None:
    service_id = f"reconfigurator-{secrets.token_hex(2)}"
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    closed = asyncio.Event()
    async with AsyncExitStack() as stack:
        if settings.planner_mode == "apply":
            stack.enter_context(only_planner(Path(settings.instances_dir)))
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
        members = Members(nodes, settings.model_name)
        service = ReconfiguratorService(
            bus,
            HoldingPlanner(_new_plan_id) if options is None else Planner(options, _new_plan_id),
            Monitor(window_s=settings.plan_window_s, slo_s=settings.slo_ms / 1000),
            members,
            Plans(Path(settings.plans_dir)),
            Identity.here(service_id),
            telemetry=telemetry,
            clocks=Clocks(time.monotonic, time.time),
            every_s=settings.plan_every_s,
            slo_s=settings.slo_ms / 1000,
            measure_s=settings.plan_window_s,
            keeper=_keeper(settings, nodes, bus, members),
            silence=Silence(settings.silent_timeout_s, settings.launch_timeout_s),
        )
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, service.stop, number.name)
        await run_while_open(service.run(), closed)


def _keeper(
    settings: ReconfiguratorSettings, nodes: tuple[int, ...], bus: Bus, members: Members
) -> Keeper | None:
    """None unless plans are to be carried out."""
    if settings.planner_mode == "advise":
        return None

    async def served_by(name: str) -> None:
        while members.id_of(time.monotonic(), name) is None:  # noqa: ASYNC110  # heard elsewhere
            await asyncio.sleep(0.05)

    crash, degrees = CrashPoints(settings.crash_at), degrees_of(settings.tp_degrees)
    executor = Executor(
        build_launcher(settings, nodes, os.environ),
        BusDrainer(
            bus,
            lambda name: members.id_of(time.monotonic(), name),
            hold_s=HOLD_S,
        ),
        served_by=served_by,
        new_name=lambda: f"tp-{secrets.token_hex(3)}",
        clock=time.monotonic,
        patience=Patience(drain_s=settings.drain_timeout_s, launch_s=settings.launch_timeout_s),
        nodes=nodes,
        floor=settings.capacity_floor,
        at=lambda stage: crash.reach(CRASH_POINTS[stage]) if stage in CRASH_POINTS else None,
    )
    smallest = only(nodes, degrees, degrees[0])
    initial = parse_mix(settings.initial_mix, degrees) if settings.initial_mix else smallest
    return Keeper(executor, nodes, Path(settings.instances_dir), initial)


def _new_plan_id() -> str:
    return f"plan-{secrets.token_hex(3)}"


if __name__ == "__main__":
    main()
