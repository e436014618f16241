"""Attention backends, chosen by name: full, bidirectional, over rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention.runs import PooledKeys, Run
from dilaserve_gpu_worker.attention.sdpa import attend_by_sdpa

__all__ = ["Attention", "PooledKeys", "Run", "attention_backend"]


class Attention(Protocol):
    """Attention of one layer of a ragged batch. Shape letters: models.model."""

    def __call__(
        self,
        q_THA: Tensor,
        k_TGA: Tensor,
        v_TGA: Tensor,
        pooled: PooledKeys | None,
        runs: Sequence[Run],
    ) -> Tensor:
        """Mix values as THA. The batch's own keys and values are already in the pool, where there
        is one. Tokens outside all runs (padding) come back as zeros."""
        ...


def attention_backend(name: str) -> Attention:
    """The backend called `name`. Raises SettingsError for an unknown one."""
    backends: dict[str, Attention] = {"sdpa": attend_by_sdpa}
    if name not in backends:
        raise SettingsError(f"attention backend {name!r} is unknown; use one of {sorted(backends)}")
    return backends[name]
