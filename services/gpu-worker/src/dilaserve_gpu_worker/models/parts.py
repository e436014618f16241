"""What the model families have in common. Shape letters: models.model."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.peers import Peers
from dilaserve_gpu_worker.models.products import linear


def embed(tokens_T: Tensor, embedding_VD: Tensor, peers: Peers) -> Tensor:
    """Embeddings TD; a rank holds the rows of its slice of the vocabulary."""
    if peers.degree == 1:
        return F.embedding(tokens_T, embedding_VD)
    local_T = tokens_T - peers.rank * len(embedding_VD)
    is_ours_T = (local_T >= 0) & (local_T < len(embedding_VD))
    h_TD = F.embedding(local_T.where(is_ours_T, 0), embedding_VD)
    return peers.reduce(h_TD.where(is_ours_T[:, None], 0.0))


def rms_norm(h_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root mean square norm, in fp32 whatever the activations' type."""
    normed_TD = F.rms_norm(h_TD.float(), h_TD.shape[-1:], eps=eps)
    return normed_TD.to(h_TD.dtype).mul_(weight_D)


def feed_forward(x_TD: Tensor, gate_up_YD: Tensor, down_DF: Tensor) -> Tensor:
    """SwiGLU; `gate_up_YD` holds the rows of the gate, then those of the other factor."""
    gate_TF, up_TF = linear(x_TD, gate_up_YD).chunk(2, dim=-1)
    return linear(F.silu(gate_TF).mul_(up_TF), down_DF)


class Project(Protocol):
    """`project_qkv` of a model."""

    def __call__(
        self,
        h_TD: Tensor,
        norm_D: Tensor,
        qkv_XD: Tensor,
        qkv_bias_X: Tensor | None,
        cos_T1A: Tensor,
        sin_T1A: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, and values."""
        ...


class Feed(Protocol):
    """`feed`, compiled or not."""

    def __call__(
        self, h_TD: Tensor, norm_D: Tensor, gate_up_YD: Tensor, down_DF: Tensor, eps: float
    ) -> Tensor:
        """What to add."""
        ...


def project_qkv(
    h_TD: Tensor,
    norm_D: Tensor,
    qkv_XD: Tensor,
    qkv_bias_X: Tensor | None,
    cos_T1A: Tensor,
    sin_T1A: Tensor,
    eps: float,
    *,
    n_q: int,
    n_kv: int,
) -> tuple[Tensor, Tensor]:
    """From residuals to what attention wants: rotated queries, then keys, T(H+G)A, and values."""
    qkv_TX = linear(rms_norm(h_TD, norm_D, eps), qkv_XD, qkv_bias_X)
    qkv_TXA = qkv_TX.view(len(h_TD), n_q + 2 * n_kv, -1)
    qk_TXA = qkv_TXA[:, : n_q + n_kv].to(cos_T1A.dtype)
    return rotate(qk_TXA, cos_T1A, sin_T1A).to(h_TD.dtype), qkv_TXA[:, n_q + n_kv :]


def feed(h_TD: Tensor, norm_D: Tensor, gate_up_YD: Tensor, down_DF: Tensor, eps: float) -> Tensor:
    """What a block's second half adds to the residuals."""
    return feed_forward(rms_norm(h_TD, norm_D, eps), gate_up_YD, down_DF)


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines PA of the rotary position embedding, in fp32; the sines of the first half
    are negative, as `rotate` wants them."""
    even_A2 = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency_A2 = 1.0 / (config.rope_theta ** (even_A2 / config.head_dim))
    position_P = torch.arange(config.max_sequence_length, dtype=torch.float32, device=device)
    angle_PA2 = torch.outer(position_P, frequency_A2)
    cos_PA2, sin_PA2 = angle_PA2.cos(), angle_PA2.sin()
    return cos_PA2.repeat(1, 2), torch.cat((-sin_PA2, sin_PA2), dim=-1)


def rotate(x_TXA: Tensor, cos_T1A: Tensor, sin_T1A: Tensor) -> Tensor:
    """Rotary position embedding, halves split, in the type of its arguments."""
    first, second = x_TXA.chunk(2, dim=-1)
    turned_TXA = torch.cat((second, first), dim=-1)
    return (x_TXA * cos_T1A).add_(turned_TXA.mul_(sin_T1A))
