"""Attention by kernels for rows of different lengths, one call per pass and layer; CUDA, 16 bits.

`paged` kernels read keys in the pool by a table of pages, `gathered` ones want them one behind the
other. Kernels are passed in, so that a plain one can stand in for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention.runs import (
    Ints,
    PooledKeys,
    Prepared,
    Ragged,
    Room,
    room_of,
)
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS, n_pages_for
from dilaserve_gpu_worker.transfer import Array


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the N rows of a pass; tensors are on the device, in int32 as kernels want them."""

    n_tokens: int
    """Queries in all; padding follows them."""
    cu_queries: Tensor
    """N + 1 sums of the numbers of queries before each row."""
    cu_keys: Tensor
    n_keys: Tensor
    longest_query: int
    longest_key: int


class GatheredKernel(Protocol):
    """Non-causal attention of queries TqHA over keys and values TkGA."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
        """Mixed values as TqHA."""
        ...


class PagedKernel(Protocol):
    """The same, over pages (pages, tokens of a page, G, A) that `pages_NP` lists row by row; None:
    keys and values are TkGA."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pages_NP: Tensor | None
    ) -> Tensor:
        """Mixed values as TqHA."""
        ...


def prepare_gathered(
    ragged: Ragged, room: Room | None = None, *, kernel: GatheredKernel
) -> Prepared:
    """See attention.Attention."""
    room = room or room_of(ragged)
    slots_S = np.zeros(room.n_keys if len(ragged.write_slots) else 0, np.int64)
    if len(slots_S):
        slots = np.concatenate(_slots(ragged))
        slots_S[: len(slots)] = slots
    return Prepared(
        [*_lengths(ragged), slots_S],
        lambda tensors: partial(_attend_gathered, kernel, _bound(room, tensors), tensors[-1]),
    )


def prepare_paged(ragged: Ragged, room: Room | None = None, *, kernel: PagedKernel) -> Prepared:
    """See attention.Attention."""
    room = room or room_of(ragged)
    has_pool = len(ragged.write_slots) > 0
    table = [_page_table(ragged, n_pages_for(room.longest_key))] if has_pool else []
    return Prepared(
        [*_lengths(ragged), *table],
        lambda tensors: partial(
            _attend_paged, kernel, _bound(room, tensors), tensors[3] if has_pool else None
        ),
    )


def _page_table(ragged: Ragged, n_pages: int) -> npt.NDArray[np.int32]:
    slots = _slots(ragged)
    table = np.zeros((len(slots), n_pages), np.int32)
    for line, own in zip(table, slots, strict=True):
        pages = own[::PAGE_TOKENS] // PAGE_TOKENS
        line[: len(pages)] = pages
    return table


def _slots(ragged: Ragged) -> list[Ints]:
    """Of the keys, row by row."""
    return [ragged.slots_of(run, row) for run in ragged.runs for row in range(run.n_rows)]


def torch_kernel() -> GatheredKernel:
    """torch's own."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
        mixed = varlen_attn(
            q,
            k,
            v,
            lengths.cu_queries,
            lengths.cu_keys,
            lengths.longest_query,
            lengths.longest_key,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(mixed, Tensor)
        return mixed

    return attend


def torch_paged_kernel() -> PagedKernel:
    """torch's own, over pages. One split of the keys whatever the batch, so that batch mates
    change nothing. Not every GPU and build of torch has it for pages as small as ours."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pages_NP: Tensor | None
    ) -> Tensor:
        mixed = varlen_attn(
            q,
            k,
            v,
            lengths.cu_queries,
            lengths.cu_keys if pages_NP is None else None,
            lengths.longest_query,
            lengths.longest_key,
            enable_gqa=q.shape[1] != k.shape[-2],
            seqused_k=None if pages_NP is None else lengths.n_keys,
            block_table=pages_NP,
            num_splits=1,
        )
        assert isinstance(mixed, Tensor)
        return mixed

    return attend


def flash_attn_kernel() -> GatheredKernel:
    """That of the package flash-attn. Raises SettingsError when it is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise SettingsError(
            f"attention backend 'flash_attn' needs the package flash-attn ({error}); install "
            "dilaserve-gpu-worker[gpu], or use torch_varlen"
        ) from error

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
        mixed: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            lengths.cu_queries,
            lengths.cu_keys,
            lengths.longest_query,
            lengths.longest_key,
            causal=False,
        )
        return mixed

    return attend


def _attend_gathered(
    kernel: GatheredKernel,
    lengths: Lengths,
    slots_S: Tensor,
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    pooled: PooledKeys | None,
) -> Tensor:
    n = lengths.n_tokens
    if pooled is None:
        k_SGA, v_SGA = k_TGA[:n], v_TGA[:n]
    else:
        k_SGA = pooled.k_SGA.index_select(0, slots_S)
        v_SGA = pooled.v_SGA.index_select(0, slots_S)
    return _padded(kernel(q_THA[:n], k_SGA, v_SGA, lengths), len(q_THA))


def _attend_paged(
    kernel: PagedKernel,
    lengths: Lengths,
    pages_NP: Tensor | None,
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    pooled: PooledKeys | None,
) -> Tensor:
    n = lengths.n_tokens
    if pooled is None:
        k, v = k_TGA[:n], v_TGA[:n]
    else:
        k = pooled.k_SGA.unflatten(0, (-1, PAGE_TOKENS))
        v = pooled.v_SGA.unflatten(0, (-1, PAGE_TOKENS))
    return _padded(kernel(q_THA[:n], k, v, lengths, pages_NP), len(q_THA))


def _padded(o_NHA: Tensor, n_tokens: int) -> Tensor:
    n_missing = n_tokens - len(o_NHA)
    return F.pad(o_NHA, (0, 0, 0, 0, 0, n_missing)) if n_missing else o_NHA


def _lengths(ragged: Ragged) -> list[Array]:
    """See Lengths: cu_queries, cu_keys and n_keys."""
    n_queries = [run.n_queries for run in ragged.runs for _ in range(run.n_rows)]
    n_keys = [run.n_keys for run in ragged.runs for _ in range(run.n_rows)]
    return [_sums(n_queries), _sums(n_keys), np.array(n_keys, np.int32)]


def _bound(room: Room, tensors: Sequence[Tensor]) -> Lengths:
    cu_queries, cu_keys, n_keys = tensors[:3]
    return Lengths(
        n_tokens=room.n_queries,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        n_keys=n_keys,
        longest_query=room.longest_query,
        longest_key=room.longest_key,
    )


def _sums(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
