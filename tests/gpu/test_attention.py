"""Attention backends on a GPU against attention written out plainly, in 16 bits."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch

from dilaserve_gpu_worker.attention import attention_backend, choose_attention, on_device
from dilaserve_gpu_worker.attention.trial import RaggedCase, plain_attention, random_case
from dilaserve_gpu_worker.models.config import ModelConfig

pytestmark = pytest.mark.gpu

CONFIG = partial(
    ModelConfig,
    model_type="llada",
    d_model=0,
    n_layers=1,
    d_ff=1,
    vocab_size=2,
    max_sequence_length=4096,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tied_head=False,
    mask_id=0,
    eos_ids=frozenset(),
)
SHAPES = [
    [(1, 1363, 1363)],
    [(3, 32, 1363), (2, 32, 288), (1, 17, 100)],
    [(2, 300, 300), (1, 31, 31), (4, 32, 1363), (1, 32, 64)],
]
HEADS = {"llada": (32, 32, 128), "dream": (28, 4, 128), "small": (4, 2, 16)}


@pytest.mark.parametrize("name", ["sdpa", "torch_varlen", "torch_paged", "flash_attn"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("has_pool", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_batches(
    name: str, heads: str, has_pool: bool, dtype: torch.dtype, cuda: torch.device
) -> None:
    if name == "flash_attn" and not find_spec("flash_attn"):
        pytest.skip("the package flash-attn is not installed here")
    for seed, shapes in enumerate(SHAPES):
        if not has_pool:
            shapes = [(n_rows, n_queries, n_queries) for n_rows, n_queries, _ in shapes]
        case = _case(shapes, heads, seed, has_pool).to(cuda, dtype)
        if name == "torch_paged" and not _has_small_pages(case, cuda):
            pytest.skip("this torch has no attention over pages of 32 tokens on this GPU")
        attend = on_device(attention_backend(name), case.ragged, cuda)
        mixed = attend(case.q_THA, case.k_TGA, case.v_TGA, case.pooled)
        torch.testing.assert_close(mixed.double(), plain_attention(case), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads", ["llada", "dream"])
def test_auto_finds_a_variable_length_kernel(heads: str, cuda: torch.device) -> None:
    n_heads, n_kv_heads, head_dim = HEADS[heads]
    config = CONFIG(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    assert choose_attention("auto", config, cuda, torch.bfloat16) != "sdpa"
    assert choose_attention("auto", config, cuda, torch.float32) == "sdpa"


def _has_small_pages(case: RaggedCase, cuda: torch.device) -> bool:
    try:
        attend = on_device(attention_backend("torch_paged"), case.ragged, cuda)
        attend(case.q_THA, case.k_TGA, case.v_TGA, case.pooled)
    except RuntimeError:
        return False
    return True


def _case(shapes: list[tuple[int, int, int]], heads: str, seed: int, has_pool: bool) -> RaggedCase:
    n_heads, n_kv_heads, head_dim = HEADS[heads]
    return random_case(
        shapes,
        seed=seed,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        has_pool=has_pool,
    )
