"""The worker's process: settings → the engine in its own process → bus and store → serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
import uvloop

from dilaserve.bus.nats import connect_nats
from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import DiLaServeError
from dilaserve.process import run_while_open
from dilaserve.settings import load
from dilaserve.store.redis import connect_redis
from dilaserve.telemetry import Telemetry
from dilaserve_gpu_worker.host.port import EnginePort
from dilaserve_gpu_worker.host.process import EngineNotStartedError, engine_process
from dilaserve_gpu_worker.service import WorkerService
from dilaserve_gpu_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until SIGTERM, SIGINT or a StopCommand (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(WorkerSettings, os.environ)
        crash = CrashPoints(settings.crash_at)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, crash))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except EngineNotStartedError as error:
        if not error.is_said:
            sys.stderr.write(f"dilaserve-gpu-worker: {error}\n")
        sys.exit(1)
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-gpu-worker: {error}\n")
        sys.exit(1)


async def _serve(settings: WorkerSettings, crash: CrashPoints) -> None:
    _on_stop_signals(_cancel_current_task())
    closed = asyncio.Event()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_process())
        ready = await engine.ready()
        info = msgspec.structs.replace(ready.info, pid=os.getpid())
        telemetry = Telemetry.start(
            service="gpu-worker", service_id=info.instance_id, settings=settings
        )
        stack.callback(telemetry.close)
        log.info("%s", ready.words)
        gc.freeze()  # what has been imported stays: never look through it again
        bus = await connect_nats(
            settings.nats_url,
            name=info.instance_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        store = await connect_redis(settings.redis_url, start_timeout_s=settings.start_timeout_s)
        stack.push_async_callback(store.close)
        port = EnginePort(ready.limits, engine.send)
        service = WorkerService(
            port,
            bus,
            store,
            info,
            telemetry=telemetry,
            clock=time.perf_counter,
            crash=crash,
            heartbeat_s=settings.heartbeat_ms / 1000,
            stop_timeout_s=settings.stop_timeout_s,
        )
        _on_stop_signals(service.stop)
        carrying = asyncio.create_task(engine.carry(port))
        stack.callback(carrying.cancel)
        await run_while_open(service.run(), closed)
        engine.listens = port.has_ended


def _on_stop_signals(stop: Callable[[str], object]) -> None:
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number.name)


def _cancel_current_task() -> Callable[[str], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


if __name__ == "__main__":
    main()
