"""The engine's process: settings → other ranks → model → engine, then orders until they end.

Speaks through stdin and stdout, and ends with its parent, whichever way that ends.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import IO

import msgspec
import torch

from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import DiLaServeError
from dilaserve.messages import InstanceInfo
from dilaserve.settings import load
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import EngineLostError
from dilaserve_gpu_worker.frames import read_frame, write_frame
from dilaserve_gpu_worker.host.loop import EngineLoop, Orders
from dilaserve_gpu_worker.host.orders import Lost, Order, Ping, Pong, Ready, Report
from dilaserve_gpu_worker.loading import graphs_of, load_engine, start_ranks, use_cores
from dilaserve_gpu_worker.settings import WorkerSettings


def main() -> None:
    """Exit code 0 when there are no more orders, 1 with a line on stderr when it cannot go on."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's or a container's: the parent's
        signal.signal(number, signal.SIG_IGN)
    say = _speaker(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what a library prints is no frame
    with suppress(BrokenPipeError):  # the parent has ended
        try:
            _serve(say)
        except EngineLostError as error:
            say(Lost(reason=str(error)))
            os._exit(1)  # a thread of the ranks' group may wait for one that is dead
        except DiLaServeError as error:
            sys.stderr.write(f"dilaserve-gpu-worker: {error}\n")
            sys.stderr.flush()
            os._exit(1)


def _serve(say: Callable[[Report], None]) -> None:
    settings = load(WorkerSettings, os.environ)
    parent = os.getppid()
    use_cores(settings.cpu_affinity)
    with start_ranks(settings) or nullcontext() as ranks:
        engine, info = load_engine(settings, ranks)
        orders: Orders = SimpleQueue()
        loop = EngineLoop(engine, orders, say, CrashPoints(settings.crash_at, also=parent))
        loop.warm_up(settings.block_length)
        say(Ready(info=info, limits=engine.limits, words=_words(settings, engine, info)))
        gc.freeze()  # what has been imported and loaded stays: never look through it again
        listening = partial(_listen, sys.stdin.buffer, orders, say)
        threading.Thread(target=listening, daemon=True).start()
        if ranks is not None:
            ranks.watch(lambda error: say(Lost(reason=str(error))))
        loop.run()


def _words(settings: WorkerSettings, engine: Engine, info: InstanceInfo) -> str:
    graphs = graphs_of(settings, torch.device(info.device), engine.attention)
    return (
        f"model {info.model_id} on {info.device}, tensor parallelism {info.tp_degree}, "
        f"cache {info.cache_mode}, attention {engine.attention}, CUDA graphs {graphs.words}, "
        f"torch.compile {settings.compile}, type {engine.dtype}, "
        f"plan policy {settings.plan_policy}, {info.n_kv_tokens} KV tokens"
    )


def _speaker(pipe: IO[bytes]) -> Callable[[Report], None]:
    """Reports of several threads, one at a time."""
    turn = threading.Lock()

    def say(report: Report) -> None:
        with turn:
            write_frame(pipe, report)

    return say


def _listen(pipe: IO[bytes], orders: Orders, say: Callable[[Report], None]) -> None:
    decoder = msgspec.msgpack.Decoder(list[Order] | Ping)
    with suppress(BrokenPipeError):  # then no orders come either
        while (data := read_frame(pipe)) is not None:
            match decoder.decode(data):
                case Ping():
                    say(Pong())
                case given:
                    orders.put(given)
    orders.put(None)


if __name__ == "__main__":
    main()
