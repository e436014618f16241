"""Compiled blocks on a GPU against eager ones."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dilaserve_bench.gpu.random_model import LLADA_8B, random_llada
from dilaserve_gpu_worker.engine.memory import LargestPass, largest_passes
from dilaserve_gpu_worker.engine.runner import make_runner
from dilaserve_gpu_worker.speedups import compile_if

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

SHAPE = replace(
    LLADA_8B, n_layers=2, d_model=512, n_heads=4, n_kv_heads=4, d_ff=1024, vocab_size=2048,
    max_sequence_length=512, mask_id=2047, eos_ids=frozenset({2046}),
)  # fmt: skip


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_compiled_blocks_give_the_same(
    dtype: torch.dtype, tolerance: float, cuda: torch.device
) -> None:
    if not find_spec("triton"):
        pytest.skip("the package triton is not installed here: torch cannot compile for a GPU")
    torch._dynamo.reset()
    eager = random_llada(SHAPE, device=cuda, dtype=dtype)
    compiled = random_llada(SHAPE, device=cuda, dtype=dtype)
    compile_if("on", compiled)
    for n_tokens in (512, 1024, 96):  # another size each time
        for batch in largest_passes(SHAPE, LargestPass(n_tokens, 32, "sdpa")):
            one, two = (
                make_runner(model, None, "sdpa", mask_id=2047).forward(batch).logits_MV
                for model in (eager, compiled)
            )
            distance = (one.softmax(-1) - two.softmax(-1)).abs().max().item()
            assert distance < tolerance
