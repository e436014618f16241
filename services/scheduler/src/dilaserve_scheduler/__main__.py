"""The scheduler's process: settings → bus and store → core → serve, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack

import uvloop

from dilaserve.bus.nats import connect_nats
from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import DiLaServeError
from dilaserve.process import Identity, collect_rarely, run_while_open
from dilaserve.settings import load
from dilaserve.store.redis import connect_redis
from dilaserve.telemetry import Telemetry
from dilaserve_scheduler.core import Core
from dilaserve_scheduler.policies import build_policy
from dilaserve_scheduler.profile_notes import ProfileNotes, summary
from dilaserve_scheduler.service import Clocks, SchedulerService
from dilaserve_scheduler.settings import SchedulerSettings

log = logging.getLogger("dilaserve_scheduler")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until SIGTERM or SIGINT (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(SchedulerSettings, os.environ)
        build_core(settings, term=1)  # wrong settings end the process before it takes the lease
        crash = CrashPoints(settings.crash_at)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, crash))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-scheduler: {error}\n")
        sys.exit(1)


def build_core(settings: SchedulerSettings, *, term: int) -> Core:
    """A core with a fresh policy. Raises SettingsError."""
    return Core(build_policy(settings.policy, settings.options()), settings.core(), term=term)


async def _serve(settings: SchedulerSettings, crash: CrashPoints) -> None:
    service_id = f"scheduler-{secrets.token_hex(2)}"
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(service="scheduler", service_id=service_id, settings=settings)
        stack.callback(telemetry.close)
        profiles = settings.options().profiles
        if profiles is not None:
            log.info(summary(profiles, settings.profile))
        closed = asyncio.Event()
        bus = await connect_nats(
            settings.nats_url,
            name=service_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        store = await connect_redis(settings.redis_url, start_timeout_s=settings.start_timeout_s)
        stack.push_async_callback(store.close)
        service = SchedulerService(
            bus,
            store,
            Identity.here(service_id),
            build_core=lambda term: build_core(settings, term=term),
            telemetry=telemetry,
            clocks=Clocks(time.monotonic, time.time, time.perf_counter),
            crash=crash,
            notes=ProfileNotes(profiles),
            lease_ttl_s=settings.lease_ttl_s,
            submit_timeout_s=settings.submit_timeout_s,
        )
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, service.stop, number.name)
        collect_rarely()
        await run_while_open(service.run(), closed)


if __name__ == "__main__":
    main()
