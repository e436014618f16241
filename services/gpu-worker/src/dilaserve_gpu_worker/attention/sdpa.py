"""Attention by torch's scaled_dot_product_attention, some calls a pass and layer; any device.

Rows are never padded to each other's keys: that would change sums, and so a row's result, with
its batch mates. A batch of rows of one shape gives each row the bits that it gets alone. Keys
whose pages follow each other are read in the pool, others are copied out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.attention.runs import Ints, PooledKeys, Prepared, Ragged, Room, Run
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS

ALIGNMENT = 64
"""Bytes of a vector: MKL takes some sums in another order of a row that begins between two."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a run whose keys are had in one way, in one call."""

    n_rows: int
    n_keys: int
    start: int
    """Flat index of the first query."""
    stop: int
    pages: Ints
    """Those to copy, row by row; none where `first_slot` says where they lie, or where a row's keys
    are its own tokens."""
    first_slot: int | None = None
    """Where the first row's keys begin in the pool, in which each row's follow each other."""
    pitch: int = 0
    """Slots from the beginning of one row's keys to that of the next."""

    @property
    def reads_pool(self) -> bool:
        """Whether keys beside the rows' own tokens are wanted."""
        return self.first_slot is not None or len(self.pages) > 0


def prepare_sdpa(ragged: Ragged, room: Room | None = None) -> Prepared:
    """See attention.Attention. Raises ValueError for a room: its calls follow a batch's runs."""
    if room is not None:
        raise ValueError("sdpa has room for the batch itself only; use a backend of STATIC")
    parts = [part for run in ragged.runs for part in _parts(ragged, run)]
    return Prepared(
        [part.pages for part in parts], lambda tensors: partial(_attend, parts, tensors)
    )


def _parts(ragged: Ragged, run: Run) -> Iterator[_Part]:
    if run.first_key is None:
        yield _Part(run.n_rows, run.n_keys, run.start, run.stop, ragged.key_slots[:0])
        return
    stop = run.first_key + run.n_rows * run.n_keys
    slots = ragged.key_slots[run.first_key : stop].reshape(run.n_rows, run.n_keys)
    slots_BP = slots[:, ::PAGE_TOKENS]
    is_straight_B = (slots_BP[:, 1:] - slots_BP[:, :-1] == PAGE_TOKENS).all(axis=1).tolist()
    first_slot_B = slots_BP[:, 0].tolist()
    first = 0
    while first < run.n_rows:
        last = _end_of_part(first, is_straight_B, first_slot_B)
        at, is_straight = run.start + first * run.n_queries, is_straight_B[first]
        yield _Part(
            n_rows=last - first,
            n_keys=run.n_keys,
            start=at,
            stop=at + (last - first) * run.n_queries,
            pages=slots_BP[first : first if is_straight else last].reshape(-1) // PAGE_TOKENS,
            first_slot=first_slot_B[first] if is_straight else None,
            pitch=first_slot_B[last - 1] - first_slot_B[last - 2] if last - first > 1 else 0,
        )
        first = last


def _end_of_part(first: int, is_straight_B: Sequence[bool], first_slot_B: Sequence[int]) -> int:
    """Index behind the last row that can be had with row `first`, all of them at even distances in
    the pool, or all copied."""
    rows = range(first + 1, len(is_straight_B))
    if not is_straight_B[first]:
        return next((row for row in rows if is_straight_B[row]), len(is_straight_B))
    pitch = first_slot_B[first + 1] - first_slot_B[first] if rows else 0
    for row in rows:
        distance = first_slot_B[row] - first_slot_B[row - 1]
        if not is_straight_B[row] or distance != pitch or distance < 0:
            return row
    return len(is_straight_B)


def _attend(
    parts: Sequence[_Part],
    pages: Sequence[Tensor],
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    pooled: PooledKeys | None,
) -> Tensor:
    mixed = []
    for part, its_pages in zip(parts, pages, strict=True):
        if part.reads_pool and pooled is not None:
            k_BGKA = _pooled(pooled.k_SGA, its_pages, part)
            v_BGKA = _pooled(pooled.v_SGA, its_pages, part)
        else:
            k_BGKA = _own(k_TGA, part)
            v_BGKA = _own(v_TGA, part)
        o_BHQA = F.scaled_dot_product_attention(
            _own(q_THA, part), k_BGKA, v_BGKA, enable_gqa=q_THA.shape[1] != k_TGA.shape[1]
        )
        mixed.append(o_BHQA.transpose(1, 2).reshape(-1, *q_THA.shape[1:]))
    n_padding = len(q_THA) - parts[-1].stop
    if n_padding:
        mixed.append(q_THA.new_zeros(n_padding, *q_THA.shape[1:]))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _pooled(pool_SGA: Tensor, pages: Tensor, part: _Part) -> Tensor:
    """Keys or values of a part's rows as BGKA. What lies behind a row's last key is left out."""
    if part.first_slot is not None:
        return _rows(pool_SGA, part.first_slot, part.pitch, part.n_rows, part.n_keys)
    # Whole pages, which is faster than slot by slot.
    pool_PSGA: Tensor = pool_SGA.unflatten(0, (-1, PAGE_TOKENS))
    copied_SGA = pool_PSGA.index_select(0, pages).flatten(0, 1)
    return _rows(copied_SGA, 0, len(copied_SGA) // part.n_rows, part.n_rows, part.n_keys)


def _own(x_THA: Tensor, part: _Part) -> Tensor:
    """A part of the flat axis as BHQA. A view where every token, and with it every row, lies as the
    first one does; what lies so must depend on the model alone."""
    n_tokens = (part.stop - part.start) // part.n_rows
    rows_BHQA = _rows(x_THA, part.start, n_tokens, part.n_rows, n_tokens)
    if x_THA.stride(0) * x_THA.itemsize % ALIGNMENT == 0:
        return rows_BHQA
    n_wide = n_tokens + -n_tokens % ALIGNMENT  # so many tokens fill vectors, whatever one takes
    wide_BQHA = x_THA.new_empty(part.n_rows, n_wide, *x_THA.shape[1:])
    return wide_BQHA[:, :n_tokens].transpose(1, 2).copy_(rows_BHQA)


def _rows(x_SGA: Tensor, first: int, pitch: int, n_rows: int, n_tokens: int) -> Tensor:
    """Rows of `n_tokens` each as BGKA: the first begins at slot `first`, the next ones after
    `pitch` slots each. One view, where slicing, splitting and turning would be three."""
    slot, head, element = x_SGA.stride()
    return x_SGA.as_strided(
        (n_rows, x_SGA.shape[1], n_tokens, x_SGA.shape[2]),
        (pitch * slot, head, slot, element),
        x_SGA.storage_offset() + first * slot,
    )
