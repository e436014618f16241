"""Dream: Qwen2's transformer made bidirectional, with biases on queries, keys and values. Its
hidden state at a position predicts the token behind it (ModelConfig.logit_shift).
"""

from __future__ import annotations

import torch

from dilaserve_gpu_worker.models.transformer import Transformer


class Dream(Transformer):
    """The published Dream architecture: RoPE in the type of the activations."""

    def _rotary_dtype(self) -> torch.dtype:
        return self.dtype
