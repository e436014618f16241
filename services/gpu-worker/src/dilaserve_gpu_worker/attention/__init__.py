"""Attention backends, chosen by name: full, bidirectional, over rows of different lengths."""

from dilaserve_gpu_worker.attention.backends import (
    PAGED,
    STATIC,
    attention_backend,
    choose_attention,
    on_device,
)
from dilaserve_gpu_worker.attention.runs import (
    Attention,
    LayerAttention,
    PooledKeys,
    Prepared,
    Ragged,
    Room,
    Run,
    room_of,
)

__all__ = ["PAGED", "STATIC", "Attention", "LayerAttention", "PooledKeys", "Prepared", "Ragged"]
__all__ += ["Room", "Run", "attention_backend", "choose_attention", "on_device", "room_of"]
