"""The engine's process: settings → other ranks → model → engine, then orders until they end.

Speaks through stdin and stdout, and ends with its parent, whichever way that ends.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from dilaserve_gpu_worker.parallel import Ranks
from dilaserve_gpu_worker.settings import WorkerSettings

MEMORY_FULL = re.compile("out of memory|can't allocate memory")
"""What a RuntimeError of torch says, on a GPU and on a CPU."""


def main() -> None:
    """Exit code 0 when there are no more orders, 1 with a line on stderr when it cannot go on."""
    say = _speaker(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what a library prints is no frame
    with suppress(BrokenPipeError):  # the parent has ended
        try:
            with _memory_is_named():
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
        if ranks is not None:
            ranks.watch(lambda error: say(Lost(reason=str(error))))
        # Not sys.stdin, which the interpreter closes at its end, while the thread reads it.
        listening = partial(_listen, os.fdopen(os.dup(0), "rb"), orders, say, ranks)
        threading.Thread(target=listening, daemon=True).start()
        loop.run()


def _words(settings: WorkerSettings, engine: Engine, info: InstanceInfo) -> str:
    graphs = graphs_of(settings, torch.device(info.device), engine.attention)
    return (
        f"model {info.model_id} on {info.device}, tensor parallelism {info.tp_degree}, "
        f"cache {info.cache_mode}, attention {engine.attention}, CUDA graphs {graphs.words}, "
        f"torch.compile {settings.compile}, type {engine.dtype}, products {engine.products}, "
        f"kernels {engine.kernels}, plan policy {settings.plan_policy}, "
        f"{info.n_kv_tokens} KV tokens"
    )


def _speaker(pipe: IO[bytes]) -> Callable[[Report], None]:
    """Reports of several threads, one at a time."""
    turn = threading.Lock()

    def say(report: Report) -> None:
        with turn:
            write_frame(pipe, report)

    return say


def _listen(
    pipe: IO[bytes], orders: Orders, say: Callable[[Report], None], ranks: Ranks | None
) -> None:
    decoder = msgspec.msgpack.Decoder(list[Order] | Ping)
    with suppress(BrokenPipeError):  # then no orders come either
        try:
            while (data := read_frame(pipe)) is not None:
                match decoder.decode(data):
                    case Ping() if ranks is not None and ranks.is_silent:
                        pass  # without one of them no pass ends, as if this process were stopped
                    case Ping():
                        say(Pong())
                    case given:
                        orders.put(given)
        except msgspec.DecodeError as error:
            say(
                Lost(
                    reason=f"the engine's process cannot read its orders ({error}); "
                    "start the instance again"
                )
            )
    orders.put(None)


@contextmanager
def _memory_is_named() -> Iterator[None]:
    """Raises EngineLostError where memory was full, in whatever words torch says it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and not MEMORY_FULL.search(words):
            raise
        raise EngineLostError(
            f"the engine's memory is full ({words or 'MemoryError'}); use a smaller model or "
            "DILASERVE_DTYPE=bfloat16, or lower DILASERVE_KV_TOKENS or DILASERVE_MAX_BATCH_TOKENS"
        ) from error


if __name__ == "__main__":
    main()
