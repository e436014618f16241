"""What LLaDA and Dream have in common: a bidirectional pre-norm transformer with rotary positions
and SwiGLU, on one device.

Knows neither batches nor caches: `attend` gives each layer its keys. Of several ranks each computes
the heads, the feed-forward width and the vocabulary that `config` says are its own, and `peers`
joins them. Shape letters: models.model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Attend
from dilaserve_gpu_worker.models.parts import (
    Feed,
    Project,
    embed,
    feed,
    project_qkv,
    rms_norm,
    rotary_tables,
)
from dilaserve_gpu_worker.models.peers import Apart, Peers
from dilaserve_gpu_worker.models.products import linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Projections that read the same input are stacked into one matrix."""

    attn_norm_D: Tensor
    qkv_XD: Tensor
    """Rows: queries (H·A), keys (G·A), values (G·A)."""
    qkv_bias_X: Tensor | None
    attn_out_DX: Tensor
    ff_norm_D: Tensor
    gate_up_YD: Tensor
    """Rows: gate (F), up (F)."""
    down_DF: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a rank, in the type and on the device in which the model computes. All
    matrices but the embedding may be packed (see products)."""

    embedding_VD: Tensor
    layers: list[LayerWeights]
    final_norm_D: Tensor
    head_VD: Tensor


class Transformer(ABC):
    """RMSNorm in fp32; each architecture says in which type its positions are rotated."""

    def __init__(self, config: ModelConfig, weights: Weights, peers: Peers) -> None:
        self.config = config
        self._weights = weights
        self._peers = peers
        cos_PA, sin_PA = rotary_tables(config, self.device)
        rotary = self._rotary_dtype()
        self._cos_PA, self._sin_PA = cos_PA.to(rotary), sin_PA.to(rotary)
        self._project: Project = partial(project_qkv, n_q=config.n_heads, n_kv=config.n_kv_heads)
        self._feed: Feed = feed

    @abstractmethod
    def _rotary_dtype(self) -> torch.dtype:
        """Type in which queries and keys are rotated."""

    @property
    def device(self) -> torch.device:
        """Where the weights are and the forward pass runs."""
        return self._weights.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, keys and values."""
        return self._weights.embedding_VD.dtype

    @property
    def is_packed(self) -> bool:
        """See Model."""
        return self._weights.head_VD.is_mkldnn

    def apart(self) -> Transformer:
        """See Model."""
        peers = Apart(self._peers.rank, self._peers.degree)
        return type(self)(self.config, self._weights, peers)

    def compile(self) -> None:
        """Have torch compile all between attention and the ranks' sums, once for all layers, when
        they first run; values may change in their last bits. Weights must not be packed."""
        self._project, self._feed = torch.compile(self._project), torch.compile(self._feed)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Last hidden states TD, before the final norm. Positions count from 0 within a request."""
        reduce = self._peers.reduce
        h_TD = embed(tokens_T, self._weights.embedding_VD, self._peers)
        cos_T1A = self._cos_PA[positions_T].unsqueeze(1)
        sin_T1A = self._sin_PA[positions_T].unsqueeze(1)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self._weights.layers):
            qk_TXA, v_TGA = self._project(
                h_TD, layer.attn_norm_D, layer.qkv_XD, layer.qkv_bias_X, cos_T1A, sin_T1A, eps
            )
            n_q = self.config.n_heads
            o_THA = attend(index, qk_TXA[:, :n_q], qk_TXA[:, n_q:], v_TGA)
            h_TD += reduce(linear(o_THA.flatten(1), layer.attn_out_DX))
            h_TD += reduce(self._feed(h_TD, layer.ff_norm_D, layer.gate_up_YD, layer.down_DF, eps))
        return h_TD

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits NV in fp32, one row for each of `h_ND`."""
        x_ND = rms_norm(h_ND, self._weights.final_norm_D, self.config.rms_norm_eps)
        return self._peers.gather(linear(x_ND, self._weights.head_VD)).float()
