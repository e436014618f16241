"""LLaDA: no biases; its hidden state at a position predicts the token there."""

from __future__ import annotations

import torch

from dilaserve_gpu_worker.models.transformer import Transformer


class LLaDA(Transformer):
    """The published LLaDA architecture: RoPE in fp32."""

    def _rotary_dtype(self) -> torch.dtype:
        return torch.float32
