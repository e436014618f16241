"""A transformer's weights, and its blocks as torch computes them. Shape letters: models.model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Attend
from dilaserve_gpu_worker.models.parts import Feed, Project, feed, project_qkv, rotary_tables
from dilaserve_gpu_worker.models.peers import Peers
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


class Blocks(Protocol):
    """All blocks of a model."""

    def run(
        self, h_TD: Tensor, positions_T: Tensor, attend: Attend, wanted_N: Tensor | None
    ) -> Tensor:
        """From embeddings, which it may overwrite, to the last hidden states; see Model.hidden."""
        ...


class TorchBlocks:
    """On any device, in any type. `rotary`: type in which queries and keys are rotated."""

    def __init__(
        self, config: ModelConfig, weights: Weights, peers: Peers, rotary: torch.dtype
    ) -> None:
        self._config = config
        self._layers = weights.layers
        self._peers = peers
        cos_PA, sin_PA = rotary_tables(config, weights.embedding_VD.device)
        self._cos_PA, self._sin_PA = cos_PA.to(rotary), sin_PA.to(rotary)
        self._project: Project = partial(project_qkv, n_q=config.n_heads, n_kv=config.n_kv_heads)
        self._feed: Feed = feed

    def compile(self) -> None:
        """Have torch compile all between attention and the ranks' sums."""
        self._project, self._feed = torch.compile(self._project), torch.compile(self._feed)

    def run(
        self, h_TD: Tensor, positions_T: Tensor, attend: Attend, wanted_N: Tensor | None
    ) -> Tensor:
        """See Blocks."""
        reduce, n_q, eps = self._peers.reduce, self._config.n_heads, self._config.rms_norm_eps
        cos_T1A = self._cos_PA[positions_T].unsqueeze(1)
        sin_T1A = self._sin_PA[positions_T].unsqueeze(1)
        for index, layer in enumerate(self._layers):
            qk_TXA, v_TGA = self._project(
                h_TD, layer.attn_norm_D, layer.qkv_XD, layer.qkv_bias_X, cos_T1A, sin_T1A, eps
            )
            o_TX = attend(index, qk_TXA[:, :n_q], qk_TXA[:, n_q:], v_TGA).flatten(1)
            if layer is self._layers[-1] and wanted_N is not None:
                h_TD, o_TX = h_TD.index_select(0, wanted_N), o_TX.index_select(0, wanted_N)
            h_TD += reduce(linear(o_TX, layer.attn_out_DX))
            h_TD += reduce(self._feed(h_TD, layer.ff_norm_D, layer.gate_up_YD, layer.down_DF, eps))
        return h_TD
