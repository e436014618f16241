"""Attention by torch's scaled_dot_product_attention, one call per run; any device.

Rows are never padded to each other's keys: that would change sums, and so a row's result, with
its batch mates. A batch of rows of one shape gives each row the bits that it gets alone.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.attention.runs import PooledKeys, Prepared, Ragged, Room, Run


def prepare_sdpa(ragged: Ragged, room: Room | None = None) -> Prepared:
    """See attention.Attention. Raises ValueError for a room: its calls follow a batch's runs."""
    if room is not None:
        raise ValueError("sdpa has room for the batch itself only; use a backend of STATIC")
    return Prepared([ragged.key_slots], lambda tensors: partial(_attend, ragged, tensors[0]))


def _attend(
    ragged: Ragged,
    key_slots: Tensor,
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    pooled: PooledKeys | None,
) -> Tensor:
    o_THA = torch.zeros_like(q_THA, memory_format=torch.contiguous_format)
    for run in ragged.runs:
        k_SGA, v_SGA = _keys(run, key_slots, k_TGA, v_TGA, pooled)
        o_BHQA = F.scaled_dot_product_attention(
            _rows(q_THA[run.start : run.stop], run.n_rows),
            _rows(k_SGA, run.n_rows),
            _rows(v_SGA, run.n_rows),
            enable_gqa=q_THA.shape[1] != k_TGA.shape[1],
        )
        _rows(o_THA[run.start : run.stop], run.n_rows).copy_(o_BHQA)
    return o_THA


def _keys(
    run: Run, key_slots: Tensor, k_TGA: Tensor, v_TGA: Tensor, pooled: PooledKeys | None
) -> tuple[Tensor, Tensor]:
    if run.first_key is None or pooled is None:
        return k_TGA[run.start : run.stop], v_TGA[run.start : run.stop]
    slots = key_slots[run.first_key : run.first_key + run.n_rows * run.n_keys]
    return pooled.k_SGA.index_select(0, slots), pooled.v_SGA.index_select(0, slots)


def _rows(x_THA: Tensor, n_rows: int) -> Tensor:
    """Split the flat axis into rows: THA → BHQA, a view."""
    return x_THA.view(n_rows, -1, *x_THA.shape[1:]).transpose(1, 2)
