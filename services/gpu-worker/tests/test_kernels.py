"""Our own kernels give torch's bits, whatever the widths, and fused blocks those of torch's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.device import can_fuse
from dilaserve_gpu_worker.kernels import compile_kernels, compile_store
from dilaserve_gpu_worker.models import fused
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.parts import rms_norm, rotary_tables, rotate
from dilaserve_gpu_worker.weights import load_model, read_config

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not can_fuse(CPU, torch.float32), reason="this CPU has no AVX2, so that no kernels are fused"
)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [16, 48, 128, 352, 1000])
def test_swiglu_has_the_bits_of_torch(width: int) -> None:
    gate_up_CY = draw(40, 2 * width, scale=6)
    gate_CF, up_CF = gate_up_CY.chunk(2, dim=-1)
    x_CF = torch.empty(40, width)
    compile_kernels(d_model=16, head_dim=4, n_rotated=1).swiglu(gate_up_CY.numpy(), x_CF.numpy())
    whole = width - width % 32  # torch computes the rest of a row without vectors
    assert torch.equal(x_CF[:, :whole], (F.silu(gate_CF) * up_CF)[:, :whole])
    assert torch.allclose(x_CF, F.silu(gate_CF) * up_CF, rtol=1e-6, atol=0)


def test_swiglu_far_from_zero() -> None:
    gate = torch.tensor(
        [-torch.inf, -1e30, -200, -104, -95, -88, -0.0, 0, 88, 200, 1e30, torch.nan]
    )
    gate_up_CY = torch.cat((gate, torch.ones(12)))[None]
    x_CF = torch.empty(1, 12)
    compile_kernels(d_model=16, head_dim=4, n_rotated=1).swiglu(gate_up_CY.numpy(), x_CF.numpy())
    assert torch.equal(x_CF[0].isnan(), F.silu(gate).isnan())
    assert torch.allclose(x_CF[0], F.silu(gate), rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("width", [2, 3, 6, 7, 16, 48, 77, 128, 1000, 3584, 4096, 12288])
def test_norm_has_the_bits_of_torch(width: int) -> None:
    h_CD, delta_CD, weight_D = draw(40, width), draw(40, width, scale=0.1), draw(width)
    x_CD, sum_CD = torch.empty(40, width), h_CD.clone()
    compile_kernels(d_model=width, head_dim=4, n_rotated=1).add_norm(
        *(sum_CD.numpy(), delta_CD.numpy(), weight_D.numpy(), np.float32(1e-6), x_CD.numpy())
    )
    assert torch.equal(sum_CD, h_CD + delta_CD)
    assert torch.equal(x_CD, rms_norm(h_CD + delta_CD, weight_D, 1e-6))


@pytest.mark.parametrize(
    ("head_dim", "n_q", "n_kv"), [(16, 8, 8), (64, 4, 1), (6, 3, 1), (2, 1, 1)]
)
def test_rotation_has_the_bits_of_torch(
    make_folder: Any, head_dim: int, n_q: int, n_kv: int
) -> None:
    folder = make_folder(d_model=head_dim * n_q, n_heads=n_q, n_kv_heads=n_kv)
    cos_PA, sin_PA = rotary_tables(read_config(folder), CPU)
    x_CHA, position_C = draw(40, n_q + 2 * n_kv, head_dim), torch.arange(50, 10, -1)
    out_CHA = torch.empty_like(x_CHA)
    compile_kernels(d_model=16, head_dim=head_dim, n_rotated=n_q + n_kv).rotate(
        *(x_CHA.flatten(1).numpy(), position_C.numpy(), cos_PA.numpy(), sin_PA.numpy()),
        out_CHA.flatten(1).numpy(),
    )
    rotated, values = out_CHA.split((n_q + n_kv, n_kv), dim=1)
    cos_C1A, sin_C1A = (table[position_C].unsqueeze(1) for table in (cos_PA, sin_PA))
    assert torch.equal(rotated, rotate(x_CHA[:, : n_q + n_kv], cos_C1A, sin_C1A))
    assert torch.equal(values, x_CHA[:, n_q + n_kv :])


def test_rows_of_a_pool_are_written_where_they_belong() -> None:
    x_CX, pool_SX = draw(9, 30), torch.zeros(20, 4)
    slots_C = torch.tensor([19, 3, 0, 4, 7, 12, 5, 18, 1])
    compile_store()(x_CX.flatten()[8:].numpy(), 30, slots_C.numpy(), pool_SX.numpy())
    assert torch.equal(pool_SX, torch.zeros(20, 4).index_copy_(0, slots_C, x_CX[:, 8:12]))


def hidden(model: Model, n_tokens: int, wanted_N: Tensor | None = None) -> Tensor:
    """With an attention that mixes nothing, so that tokens may be many."""
    tokens_T = torch.arange(n_tokens) % 50
    with torch.inference_mode():
        return model.hidden(
            tokens_T,
            torch.arange(n_tokens) % 100,
            lambda _, q_THA, k, v: (
                q_THA + (k + v).repeat_interleave(q_THA.shape[1] // k.shape[1], 1)
            ),
            wanted_N,
        )


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("make", "d_ff"),
    [("make_folder", "mlp_hidden_size"), ("make_dream_folder", "intermediate_size")],
)
def test_fused_blocks_have_the_bits_of_torch(
    make: str,
    d_ff: str,
    packs: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(make)(**{d_ff: 96})
    ours, torchs = (load_model(folder, packs=packs, fuses=fuses) for fuses in (True, False))
    assert (ours.is_fused, torchs.is_fused) == (True, False)
    for chunk in (fused.CHUNK, 64):
        monkeypatch.setattr(fused, "CHUNK", chunk)
        for n_tokens in (32, 64, 96, 320):
            assert torch.equal(hidden(ours, n_tokens), hidden(torchs, n_tokens)), (chunk, n_tokens)


@pytest.mark.parametrize("fuses", [True, False])
def test_the_last_block_computes_what_is_wanted(make_folder: Any, fuses: bool) -> None:
    model = load_model(make_folder(), fuses=fuses)
    wanted_N = torch.arange(0, 320, 5)
    assert torch.equal(hidden(model, 320, wanted_N), hidden(model, 320)[wanted_N])
    assert hidden(model, 320, wanted_N[:0]).shape == (0, model.config.d_model)


def test_only_float32_on_a_cpu_is_fused(make_folder: Any) -> None:
    assert not can_fuse(CPU, torch.bfloat16)
    assert not can_fuse(torch.device("cuda"), torch.float32)
    assert not load_model(make_folder(), dtype=torch.bfloat16).is_fused


def test_without_numba_blocks_are_those_of_torch(
    make_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder()
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert not load_model(folder).is_fused
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not load_model(folder).is_fused
