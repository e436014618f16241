"""LLaDA: a bidirectional pre-norm transformer with rotary positions and SwiGLU, on one device.

Knows neither batches nor caches: `attend` gives each layer its keys. Shape letters: models.model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Attend


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Projections that read the same input are stacked into one matrix."""

    attn_norm_D: Tensor
    qkv_XD: Tensor
    """Rows: queries (H·A), keys (G·A), values (G·A)."""
    attn_out_DX: Tensor
    ff_norm_D: Tensor
    gate_up_YD: Tensor
    """Rows: gate (F), up (F)."""
    down_DF: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, in the type and on the device in which the model computes."""

    embedding_VD: Tensor
    layers: list[LayerWeights]
    final_norm_D: Tensor
    head_VD: Tensor


class LLaDA:
    """The published LLaDA architecture: no biases, RMSNorm and RoPE in fp32."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._cos_PA, self._sin_PA = _rotary_tables(config, self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are and the forward pass runs."""
        return self._weights.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, keys and values."""
        return self._weights.embedding_VD.dtype

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Last hidden states TD, before the final norm. Positions count from 0 within a request."""
        h_TD = F.embedding(tokens_T, self._weights.embedding_VD)
        cos_T1A = self._cos_PA[positions_T].unsqueeze(1)
        sin_T1A = self._sin_PA[positions_T].unsqueeze(1)
        for index, layer in enumerate(self._weights.layers):
            x_TD = self._norm(h_TD, layer.attn_norm_D)
            h_TD = h_TD + self._attention(index, layer, x_TD, cos_T1A, sin_T1A, attend)
            x_TD = self._norm(h_TD, layer.ff_norm_D)
            h_TD = h_TD + _feed_forward(layer, x_TD)
        return h_TD

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits NV in fp32; row i predicts the token at the position of row i itself."""
        x_ND = self._norm(h_ND, self._weights.final_norm_D)
        return F.linear(x_ND, self._weights.head_VD).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TD: Tensor,
        cos_T1A: Tensor,
        sin_T1A: Tensor,
        attend: Attend,
    ) -> Tensor:
        n_q, n_kv = self.config.n_heads, self.config.n_kv_heads
        qkv_TX = F.linear(x_TD, layer.qkv_XD)
        qkv_TXA = qkv_TX.view(len(x_TD), n_q + 2 * n_kv, self.config.head_dim)
        qk_TXA = _rotate(qkv_TXA[:, : n_q + n_kv], cos_T1A, sin_T1A)
        o_THA = attend(index, qk_TXA[:, :n_q], qk_TXA[:, n_q:], qkv_TXA[:, n_q + n_kv :])
        return F.linear(o_THA.flatten(1), layer.attn_out_DX)

    def _norm(self, h_TD: Tensor, weight_D: Tensor) -> Tensor:
        normed_TD = F.rms_norm(h_TD.float(), h_TD.shape[-1:], eps=self.config.rms_norm_eps)
        return normed_TD.to(h_TD.dtype) * weight_D


def _feed_forward(layer: LayerWeights, x_TD: Tensor) -> Tensor:
    gate_TF, up_TF = F.linear(x_TD, layer.gate_up_YD).chunk(2, dim=-1)
    return F.linear(F.silu(gate_TF) * up_TF, layer.down_DF)


def _rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    even_A2 = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency_A2 = 1.0 / (config.rope_theta ** (even_A2 / config.head_dim))
    position_P = torch.arange(config.max_sequence_length, dtype=torch.float32, device=device)
    angle_PA = torch.outer(position_P, frequency_A2).repeat(1, 2)
    return angle_PA.cos(), angle_PA.sin()


def _rotate(x_TXA: Tensor, cos_T1A: Tensor, sin_T1A: Tensor) -> Tensor:
    """Rotary position embedding, halves split, in fp32 whatever the activations' type."""
    x32_TXA = x_TXA.float()
    first, second = x32_TXA.chunk(2, dim=-1)
    turned_TXA = torch.cat((-second, first), dim=-1)
    return (x32_TXA * cos_T1A + turned_TXA * sin_T1A).to(x_TXA.dtype)
