"""The worker's process: settings → model → engine → bus and store → serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial

import torch
import uvloop

from dilaserve.bus.nats import connect_nats
from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import DiLaServeError
from dilaserve.messages import InstanceInfo
from dilaserve.process import run_while_open
from dilaserve.settings import load
from dilaserve.store.redis import connect_redis
from dilaserve.telemetry import Telemetry
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import EngineLostError
from dilaserve_gpu_worker.loading import graphs_of, load_engine, start_ranks, use_cores
from dilaserve_gpu_worker.parallel import Ranks
from dilaserve_gpu_worker.service import WorkerService
from dilaserve_gpu_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOST_TIMEOUT_S = 20.0
"""Within which an instance that has lost a rank leaves by itself: twice a collective's time-out."""


def main() -> None:
    """Serve until SIGTERM, SIGINT or a StopCommand (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(WorkerSettings, os.environ)
        crash = CrashPoints(settings.crash_at)
        use_cores(settings.cpu_affinity)
        with start_ranks(settings) or nullcontext() as ranks:
            engine, info = load_engine(settings, ranks)
            gc.freeze()  # what has been imported and loaded stays: never look through it again
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, engine, info, crash, ranks))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-gpu-worker: {error}\n")
        sys.exit(1)


async def _serve(
    settings: WorkerSettings,
    engine: Engine,
    info: InstanceInfo,
    crash: CrashPoints,
    ranks: Ranks | None,
) -> None:
    _on_stop_signals(_cancel_current_task())
    closed = asyncio.Event()
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(
            service="gpu-worker", service_id=info.instance_id, settings=settings
        )
        stack.callback(telemetry.close)
        graphs = graphs_of(settings, torch.device(info.device), engine.attention)
        log.info(
            "model %s on %s, tensor parallelism %d, cache %s, attention %s, CUDA graphs %s, "
            "torch.compile %s, type %s, plan policy %s, %d KV tokens",
            *(info.model_id, info.device, info.tp_degree, info.cache_mode),
            *(engine.attention, graphs.words, settings.compile),
            *(engine.dtype, settings.plan_policy, info.n_kv_tokens),
        )
        bus = await connect_nats(
            settings.nats_url,
            name=info.instance_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        store = await connect_redis(settings.redis_url, start_timeout_s=settings.start_timeout_s)
        stack.push_async_callback(store.close)
        service = WorkerService(
            engine,
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
        if ranks is not None:
            loop = asyncio.get_running_loop()
            ranks.watch(partial(_tell, loop, service.fail))
        await run_while_open(service.run(), closed)


def _tell(
    loop: asyncio.AbstractEventLoop,
    fail: Callable[[EngineLostError], None],
    error: EngineLostError,
) -> None:
    """From a thread that watches a rank."""
    loop.call_soon_threadsafe(fail, error)
    end_anyway(LOST_TIMEOUT_S, str(error))


def end_anyway(after_s: float, why: str) -> None:
    """End the process, if it still runs then: a pass that waits on a device for a rank that has
    died cannot be called off, and a collective in a CUDA graph has no time-out."""

    def end() -> None:
        sys.stderr.write(f"dilaserve-gpu-worker: a pass hangs, ending: {why}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def _on_stop_signals(stop: Callable[[str], object]) -> None:
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number.name)


def _cancel_current_task() -> Callable[[str], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


if __name__ == "__main__":
    main()
