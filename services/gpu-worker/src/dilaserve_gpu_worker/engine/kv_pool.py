"""The paged KV pool: which pages are free, and the tensors behind them. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.models.config import ModelConfig

if TYPE_CHECKING:
    from dilaserve_gpu_worker.kernels import Store

PAGE_TOKENS = 32


class PageAllocator:
    """Pages of `PAGE_TOKENS` tokens, each free or taken; taking and giving back are exact."""

    def __init__(self, n_pages: int) -> None:
        self._is_free = np.ones(n_pages, np.bool_)

    @property
    def n_free(self) -> int:
        """Pages that can be taken."""
        return int(np.count_nonzero(self._is_free))

    def take(self, n_pages: int) -> list[int]:
        """Take `n_pages` pages, the first that follow each other where there are such, since
        attention reads them where they lie (see attention.sdpa); the caller has looked at
        `n_free`."""
        free = np.flatnonzero(self._is_free)
        if n_pages > len(free):
            raise ValueError(f"{n_pages} KV pages wanted, {len(free)} free")
        spans = free[n_pages - 1 :] - free[: len(free) - n_pages + 1] if n_pages else free
        together = np.flatnonzero(spans == n_pages - 1)
        first = together[0] if len(together) else 0
        pages = free[first : first + n_pages]
        self._is_free[pages] = False
        taken: list[int] = pages.tolist()
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages that were taken. ValueError for one that was not."""
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"KV page {page} given back twice")
            self._is_free[page] = True


class KVPool:
    """Keys and values of every layer, by slot (S = page x PAGE_TOKENS + offset), head (G), A.
    `store`: the kernel that writes them; None: torch does."""

    def __init__(
        self,
        config: ModelConfig,
        n_pages: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        store: Store | None = None,
    ) -> None:
        shape = (config.n_layers, n_pages * PAGE_TOKENS, config.n_kv_heads, config.head_dim)
        k_LSGA = torch.zeros(shape, device=device, dtype=dtype)
        v_LSGA = torch.zeros(shape, device=device, dtype=dtype)
        self._layers = list(zip(k_LSGA, v_LSGA, strict=True))
        self._store = store

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as SGA."""
        return self._layers[index]

    def write(self, index: int, slots_T: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> None:
        """Overwrite the keys and values of one layer at `slots_T`; the heads of a token must lie
        together."""
        for pool_SGA, x_TGA in zip(self._layers[index], (k_TGA, v_TGA), strict=True):
            if self._store is None:
                pool_SGA.index_copy_(0, slots_T, x_TGA)
                continue
            stride, pool_SX = x_TGA.stride(0), pool_SGA.flatten(1)
            n_elements = (len(slots_T) - 1) * stride + pool_SX.shape[1]
            x = x_TGA.as_strided((n_elements,), (1,))
            self._store(x.numpy(), stride, slots_T.numpy(), pool_SX.numpy())


def n_pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_TOKENS)


def slots_of(pages: Sequence[int], n_tokens: int) -> npt.NDArray[np.int64]:
    """Pool slot of each of the `n_tokens` positions of a request that owns `pages`."""
    first = np.asarray(pages, dtype=np.int64)[:, None] * PAGE_TOKENS
    return (first + np.arange(PAGE_TOKENS)).reshape(-1)[:n_tokens]
