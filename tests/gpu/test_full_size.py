"""A model of LLaDA-8B's shape with random weights: the KV pool that its GPU holds, what a pass
takes beside what the card can do, and what batching and CUDA graphs bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dilaserve_bench.gpu.measure import Passes, Workload, measure_gpu
from dilaserve_bench.gpu.random_model import LLADA_8B, random_llada
from dilaserve_bench.gpu.report import lines, save
from dilaserve_gpu_worker.attention import STATIC, choose_attention
from dilaserve_gpu_worker.engine.cuda_graphs import CudaCapture
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.memory import LargestPass, kv_tokens_that_fit
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.profiling import Effort, Grid

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

BLOCK, BUDGET = 32, 8192
LEAST_GAIN = 4.0
"""Of 16 at a time over one by one."""
NEEDED_BYTES = 40 << 30
WORKLOAD = Workload(
    grid=Grid(lengths=(256, 1024, 2048), rows=(1, 4, 16, 64), n_output=256, block_length=BLOCK),
    effort=Effort(n_warm_up=4, n_passes=7, seconds=1.0),
    n_concurrent=16,
    n_prompt=64,
    n_output=96,
)


@pytest.fixture(scope="module")
def model(cuda: torch.device) -> Iterator[LLaDA]:
    free, _ = torch.cuda.mem_get_info(cuda)
    if free < NEEDED_BYTES:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, {NEEDED_BYTES >> 30} are needed")
    yield random_llada(LLADA_8B, device=cuda, dtype=torch.bfloat16)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def attention(model: LLaDA) -> str:
    return choose_attention("auto", model.config, model.device, model.dtype)


@pytest.fixture(scope="module")
def n_kv_tokens(model: LLaDA, attention: str) -> int:
    return kv_tokens_that_fit(model, LargestPass(BUDGET, BLOCK, attention, has_graphs=True))


def test_the_pool_takes_what_the_largest_pass_leaves(
    model: LLaDA, attention: str, n_kv_tokens: int
) -> None:
    """With the pool in its place there is still room for the largest pass: cache steps of whole
    blocks over as many keys as the pool holds."""
    free, total = torch.cuda.mem_get_info(model.device)
    assert n_kv_tokens > 16 * LLADA_8B.max_sequence_length
    print(f"KV pool of {n_kv_tokens} tokens; {free >> 30} of {total >> 30} GiB were free")
    length = min(n_kv_tokens * BLOCK // BUDGET, LLADA_8B.max_sequence_length) // BLOCK * BLOCK
    grid = Grid(lengths=(length,), rows=(BUDGET // BLOCK,), n_output=256, block_length=BLOCK)
    full = Workload(grid, Effort(1, 3, 0.5), n_concurrent=1, n_prompt=32, n_output=32)
    report = measure_gpu(Passes(model, n_kv_tokens, BUDGET, attention), full, None)
    assert any(row.n_tokens == BUDGET for row in report.table)
    assert torch.cuda.max_memory_allocated(model.device) < total
    torch.cuda.empty_cache()


def test_full_size(model: LLaDA, attention: str, n_kv_tokens: int, results: Path | None) -> None:
    can_capture = attention in STATIC
    graphs = GraphOptions(CudaCapture(model.device), BLOCK) if can_capture else None
    report = measure_gpu(Passes(model, n_kv_tokens, BUDGET, attention), WORKLOAD, graphs)
    print("", *lines(report), sep="\n")
    if results is not None:
        print(f"written to {save(report, results, 'full_size')}")
    assert can_capture, f"{attention} cannot be captured: no graphs were measured"
    for each in report.batching:
        assert each.gain >= LEAST_GAIN, each
    assert report.batching[-1].n_replays > 0
