"""The predictor's process: settings → bus, trees and, to record, the store; until a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from dilaserve.bus.nats import connect_nats
from dilaserve.errors import DiLaServeError
from dilaserve.process import Identity, run_while_open
from dilaserve.settings import load
from dilaserve.store.redis import connect_redis
from dilaserve.telemetry import Telemetry
from dilaserve_predictor.loading import PredictorFolder
from dilaserve_predictor.recording import BoundedFolder, TrafficRecorder
from dilaserve_predictor.service import PredictorService
from dilaserve_predictor.settings import PredictorSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until SIGTERM or SIGINT (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(PredictorSettings, os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-predictor: {error}\n")
        sys.exit(1)


async def _serve(settings: PredictorSettings) -> None:
    service_id = f"predictor-{secrets.token_hex(2)}"
    _on_stop_signals(_cancel_current_task())
    closed = asyncio.Event()
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(service="predictor", service_id=service_id, settings=settings)
        stack.callback(telemetry.close)
        bus = await connect_nats(
            settings.nats_url,
            name=service_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        service = PredictorService(
            bus,
            PredictorFolder(settings.folder, settings.model_id),
            Identity.here(service_id),
            telemetry=telemetry,
            clock=time.perf_counter,
            recorder=await _recorder(settings, service_id, stack),
        )
        _on_stop_signals(service.stop)
        await run_while_open(service.run(), closed)


async def _recorder(
    settings: PredictorSettings, service_id: str, stack: AsyncExitStack
) -> TrafficRecorder | None:
    """None unless there is a folder to record in: only then is the store needed."""
    if not settings.record_dir:
        return None
    store = await connect_redis(settings.redis_url, start_timeout_s=settings.start_timeout_s)
    stack.push_async_callback(store.close)
    folder = BoundedFolder(
        Path(settings.record_dir),
        settings.record_mb * 1_000_000,
        name=lambda: f"served-{time.time_ns() // 1_000_000}-{service_id}",
    )
    return TrafficRecorder(store, folder)


def _on_stop_signals(stop: Callable[[str], object]) -> None:
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number.name)


def _cancel_current_task() -> Callable[[str], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


if __name__ == "__main__":
    main()
