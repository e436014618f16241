"""Attention backends, chosen by name: full, bidirectional, over rows of different lengths."""

from dilaserve_gpu_worker.attention.backends import (
    Attention,
    LayerAttention,
    attention_backend,
    choose_attention,
)
from dilaserve_gpu_worker.attention.runs import PooledKeys, Ragged, Run

__all__ = ["Attention", "LayerAttention", "PooledKeys", "Ragged", "Run"]
__all__ += ["attention_backend", "choose_attention"]
