"""What the engine asks of a model, and what a model asks of the engine.

Shape letters of tensor names, in models, attention and engine alike: T tokens on the flat axis,
D model width, H query heads, G key/value heads, A head width, F feed-forward width, V vocabulary,
N rows that need logits, M such rows with padding, S slots of the KV pool, P positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig


class Attend(Protocol):
    """Attention of one layer over the keys that each token may see."""

    def __call__(self, layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
        """Take rotated queries and keys, return the mixed values as THA."""
        ...


class Model(Protocol):
    """A masked diffusion transformer on one device. Knows neither batches nor caches."""

    config: ModelConfig
    is_fused: bool
    """Whether what lies between products and attention runs in our own kernels (see kernels)."""

    @property
    def device(self) -> torch.device:
        """Where the forward pass runs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, keys and values."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether the matrices are packed (see products)."""
        ...

    def apart(self) -> Model:
        """The same on its own: it computes as much as among its ranks, but without them, and so
        nothing of worth. For trials of what a pass takes."""
        ...

    def compile(self) -> None:
        """Have torch compile what it can, when it first runs."""
        ...

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states, before the final norm, of the `wanted_N` on the flat axis (None: of
        all), so that the last block need not compute all. Positions count from 0 in a request."""
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits NV in fp32 of hidden states; for which position: ModelConfig.logit_shift."""
        ...
