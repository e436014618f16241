"""Models of a given shape whose weights are drawn on the device: nothing is read or downloaded."""

from __future__ import annotations

import torch
from torch import Tensor

from dilaserve_gpu_worker.models.blocks import LayerWeights, Weights
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.models.peers import Alone

__all__ = ["LLADA_8B", "random_llada"]

LLADA_8B = ModelConfig(
    model_type="llada",
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_ff=12288,
    vocab_size=126464,
    max_sequence_length=4096,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tied_head=False,
    mask_id=126336,
    eos_ids=frozenset({126081, 126348}),
)
"""LLaDA-8B-Instruct's config.json."""


def random_llada(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LLaDA:
    """A model whose activations are of ordinary size, and whose choices are no one's."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(n_rows: int, n_columns: int) -> Tensor:
        drawn = torch.empty(n_rows, n_columns, device=device, dtype=dtype)
        return drawn.normal_(std=n_columns**-0.5, generator=generator)

    def ones() -> Tensor:
        return torch.ones(config.d_model, device=device, dtype=dtype)

    d, f, v = config.d_model, config.d_ff, config.vocab_size
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layers = [
        LayerWeights(
            attn_norm_D=ones(),
            qkv_XD=matrix(n_q + 2 * n_kv, d),
            qkv_bias_X=None,
            attn_out_DX=matrix(d, n_q),
            ff_norm_D=ones(),
            gate_up_YD=matrix(2 * f, d),
            down_DF=matrix(d, f),
        )
        for _ in range(config.n_layers)
    ]
    return LLaDA(config, Weights(matrix(v, d), layers, ones(), matrix(v, d)), Alone())
