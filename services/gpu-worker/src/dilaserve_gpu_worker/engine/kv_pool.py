"""The paged KV pool: which pages are free, and the tensors behind them. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig

PAGE_TOKENS = 32


class PageAllocator:
    """Pages of `PAGE_TOKENS` tokens, each free or taken; taking and giving back are exact."""

    def __init__(self, n_pages: int) -> None:
        self._free = list(range(n_pages - 1, -1, -1))
        self._is_taken = [False] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def take(self, n_pages: int) -> list[int]:
        """Take `n_pages` pages; the caller has looked at `n_free`."""
        if n_pages > len(self._free):
            raise ValueError(f"{n_pages} KV pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(n_pages)]
        for page in pages:
            self._is_taken[page] = True
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages that were taken. ValueError for one that was not."""
        for page in pages:
            if not self._is_taken[page]:
                raise ValueError(f"KV page {page} given back twice")
            self._is_taken[page] = False
            self._free.append(page)


class KVPool:
    """Keys and values of every layer, by slot (S = page x PAGE_TOKENS + offset), head (G), A."""

    def __init__(
        self, config: ModelConfig, n_pages: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layers, n_pages * PAGE_TOKENS, config.n_kv_heads, config.head_dim)
        self._k_LSGA = torch.zeros(shape, device=device, dtype=dtype)
        self._v_LSGA = torch.zeros(shape, device=device, dtype=dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as SGA."""
        return self._k_LSGA[index], self._v_LSGA[index]

    def write(self, index: int, slots_T: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> None:
        """Overwrite the keys and values of one layer at `slots_T`."""
        self._k_LSGA[index].index_copy_(0, slots_T, k_TGA)
        self._v_LSGA[index].index_copy_(0, slots_T, v_TGA)


def n_pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_TOKENS)


def slots_of(pages: Sequence[int], n_tokens: int) -> npt.NDArray[np.int64]:
    """Pool slot of each of the `n_tokens` positions of a request that owns `pages`."""
    first = np.asarray(pages, dtype=np.int64)[:, None] * PAGE_TOKENS
    return (first + np.arange(PAGE_TOKENS)).reshape(-1)[:n_tokens]
