"""What LLaDA and Dream have in common: a bidirectional pre-norm transformer with rotary positions
and SwiGLU, on one device.

Knows neither batches nor caches: `attend` gives each layer its keys. Of several ranks each computes
the heads, the feed-forward width and the vocabulary that `config` says are its own, and `peers`
joins them. Shape letters: models.model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dilaserve_gpu_worker.models.blocks import Blocks, TorchBlocks, Weights
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Attend
from dilaserve_gpu_worker.models.parts import embed, rms_norm
from dilaserve_gpu_worker.models.peers import Apart, Peers
from dilaserve_gpu_worker.models.products import linear


class Transformer(ABC):
    """RMSNorm in fp32; each architecture says in which type its positions are rotated. `is_fused`:
    between products and attention our own kernels run, where these can (see device.can_fuse)."""

    def __init__(
        self, config: ModelConfig, weights: Weights, peers: Peers, *, is_fused: bool = False
    ) -> None:
        self.config = config
        self.is_fused = is_fused
        self._weights = weights
        self._peers = peers
        self._blocks: Blocks = self._fused_blocks() if is_fused else self._torch_blocks()

    @abstractmethod
    def _rotary_dtype(self) -> torch.dtype:
        """Type in which queries and keys are rotated."""

    def _fused_blocks(self) -> Blocks:
        from dilaserve_gpu_worker.models.fused import FusedBlocks  # and with it numba

        return FusedBlocks(self.config, self._weights, self._peers)

    def _torch_blocks(self) -> TorchBlocks:
        return TorchBlocks(self.config, self._weights, self._peers, self._rotary_dtype())

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
        return type(self)(self.config, self._weights, peers, is_fused=self.is_fused)

    def compile(self) -> None:
        """Have torch compile all between attention and the ranks' sums, once for all layers, when
        they first run; values may change in their last bits. Weights must not be packed."""
        self.is_fused = False
        self._blocks = blocks = self._torch_blocks()
        blocks.compile()

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """See Model."""
        h_TD = embed(tokens_T, self._weights.embedding_VD, self._peers)
        return self._blocks.run(h_TD, positions_T, attend, wanted_N)

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits NV in fp32, one row for each of `h_ND`."""
        x_ND = rms_norm(h_ND, self._weights.final_norm_D, self.config.rms_norm_eps)
        return self._peers.gather(linear(x_ND, self._weights.head_VD)).float()
