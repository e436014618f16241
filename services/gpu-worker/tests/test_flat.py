"""Many short requests, one after the other: memory stays flat, and every KV page comes back."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.model import Model

BLOCK = 8
CONCURRENCY = 16
N_KV_TOKENS = CONCURRENCY * 64
MOST_KB = 100
"""Growth of Python's memory over the short run: a leak of 0.5 kB a request exceeds it."""
MOST_MB = 8
"""Growth of the whole process over the long run: a leak of 1 kB a request exceeds it."""


@pytest.fixture
def engine(model: Model) -> Engine:
    return Engine(model, cache_mode="dual", n_kv_tokens=N_KV_TOKENS, max_batch_tokens=512)


def requests(n: int) -> Iterator[EngineRequest]:
    """One block each, prompts of different lengths."""
    spec = DecodingSpec(n_output=BLOCK, block_length=BLOCK, seed=0, ignore_eos=True)
    for number in range(n):
        prompt = [1 + (number + index) % 50 for index in range(1 + number % 40)]
        credit = Credit(threshold=0.5, until_block=0)
        yield EngineRequest(str(number), prompt, spec, 0, [MASKED] * BLOCK, credit)


def serve(engine: Engine, n: int) -> int:
    """Run them all, CONCURRENCY at a time; the number of steps."""
    waiting, n_held, n_steps = requests(n), 0, 0
    while True:
        while n_held < CONCURRENCY and (request := next(waiting, None)) is not None:
            engine.add(request)
            n_held += 1
        output = engine.step()
        if output is None:
            break
        n_steps += len(output.steps)
        for step in output.steps:
            if step.finish_reason is not None:
                engine.remove(step.request_id)
                n_held -= 1
    assert n_held == 0
    return n_steps


def test_200_requests_leave_nothing_behind(engine: Engine) -> None:
    serve(engine, 50)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        n_steps = serve(engine, 200)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_steps > 400
    assert after - before < 1000 * MOST_KB
    assert engine.n_free_kv_tokens == N_KV_TOKENS
    assert not engine.has_work()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_10_000_requests_leave_memory_flat(engine: Engine) -> None:
    process = psutil.Process()
    serve(engine, 2_000)
    gc.collect()
    before = process.memory_info().rss
    n_steps = serve(engine, 10_000)
    gc.collect()
    grown_mb = (process.memory_info().rss - before) / 1e6
    print(f"{n_steps} steps, memory grew by {grown_mb:.2f} MB")
    assert grown_mb < MOST_MB
    assert engine.n_free_kv_tokens == N_KV_TOKENS
