"""Passes replayed as CUDA graphs against the same passes run one kernel at a time, with each
attention backend that runs here; in fp32, and in 16 bits with the kernels that are used.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.gpu.random_model import LLADA_8B, random_llada
from dilaserve_gpu_worker.attention import attention_backend, on_device
from dilaserve_gpu_worker.attention.trial import random_case
from dilaserve_gpu_worker.engine.cuda_graphs import CudaCapture
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.llada import LLaDA

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

SHAPE = replace(
    LLADA_8B,
    d_model=512,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    d_ff=1024,
    vocab_size=2048,
    max_sequence_length=1024,
    mask_id=2047,
    eos_ids=frozenset({2046}),
)
HALF, FULL = torch.bfloat16, torch.float32
CASES = [
    ("masked", FULL, 1e-5),
    ("masked_paged", FULL, 1e-5),
    ("torch_varlen", HALF, 2e-2),
    ("torch_paged", HALF, 2e-2),
    ("flash_attn", HALF, 2e-2),
]


@pytest.mark.parametrize(("attention", "dtype", "tolerance"), CASES)
def test_replays_are_the_passes_that_they_stand_for(
    attention: str, dtype: torch.dtype, tolerance: float, cuda: torch.device
) -> None:
    """The same plans on both: eager decides, the replaying engine follows."""
    skip_where_missing(attention, cuda, dtype)
    model = random_llada(SHAPE, device=cuda, dtype=dtype)
    eager = engine(model, attention, None)
    replaying = engine(model, attention, GraphOptions(CudaCapture(cuda), block_length=32))
    for each in (eager, replaying):
        for number in range(11):
            each.add(request(number))
    n_cache = 0
    while (plan := eager.plan()) is not None:
        twin = replaying.plan()
        assert twin is not None
        scores, other = eager.forward(plan), replaying.forward(twin)
        n = sum(len(row.candidates) for row in plan.rows)
        one, two = scores.logits_MV[:n].double(), other.logits_MV[:n].double()
        assert (one.softmax(-1) - two.softmax(-1)).abs().max().item() < tolerance
        n_cache += all(row.kind == "cache" for row in plan.rows)
        decided = eager.unmask(plan, scores)
        with torch.inference_mode():
            other.logits_MV[:n] = one.to(other.logits_MV.dtype)
        follow(replaying, twin, other, decided)
    assert n_cache > 20
    assert replaying.n_replays > n_cache // 2
    assert replaying.n_free_kv_tokens == eager.n_free_kv_tokens


def test_memory_of_graphs_is_bounded(cuda: torch.device) -> None:
    model = random_llada(SHAPE, device=cuda, dtype=FULL)
    few = GraphOptions(CudaCapture(cuda), block_length=32, max_graphs=2, min_uses=1)
    busy = engine(model, "masked", few)
    taken = []
    for _ in range(3):
        for number in range(11):
            busy.add(request(number))
            busy.step()
        while busy.step() is not None:
            pass
        for number in range(11):
            busy.remove(str(number))
        torch.cuda.synchronize(cuda)
        taken.append(torch.cuda.memory_allocated(cuda))
    assert taken[2] <= taken[1] * 1.05


def follow(engine: Engine, plan: object, scores: object, decided: object) -> None:
    """Unmask what the other engine decided, and see that it is the same."""
    output = engine.unmask(plan, scores)  # type: ignore[arg-type]
    for ours, theirs in zip(output.steps, decided.steps, strict=True):  # type: ignore[attr-defined]
        assert (ours.request_id, ours.positions) == (theirs.request_id, theirs.positions)
        assert ours.tokens == theirs.tokens


def engine(model: LLaDA, attention: str, graphs: GraphOptions | None) -> Engine:
    return Engine(
        model,
        cache_mode="dual",
        n_kv_tokens=16384,
        max_batch_tokens=8192,
        attention=attention,
        graphs=graphs,
    )


def request(number: int) -> EngineRequest:
    """Prompts and outputs of different lengths; last blocks are shorter than a block."""
    n_output = 40 + 3 * number
    spec = DecodingSpec(n_output=n_output, block_length=32, seed=number, ignore_eos=True)
    prompt = [(17 * number + index) % 2000 for index in range(5 + 29 * number)]
    return EngineRequest(str(number), prompt, spec, 0, [MASKED] * n_output, Credit(1.0, 10**6))


def skip_where_missing(attention: str, cuda: torch.device, dtype: torch.dtype) -> None:
    if attention == "flash_attn" and not find_spec("flash_attn"):
        pytest.skip("the package flash-attn is not installed here")
    case = random_case([(1, 40, 40), (2, 32, 100)], seed=0, head_dim=128).to(cuda, dtype)
    try:
        attend = on_device(attention_backend(attention), case.ragged, cuda)
        attend(case.q_THA, case.k_TGA, case.v_TGA, case.pooled)
    except RuntimeError as error:
        pytest.skip(f"{attention} does not run on this GPU with this torch: {error}")
