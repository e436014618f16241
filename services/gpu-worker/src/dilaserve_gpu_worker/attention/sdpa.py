"""Attention by torch's scaled_dot_product_attention, one call per run; any device.

Rows are never padded to each other's keys: that would change sums, and so a row's result, with
its batch mates. A batch of rows of one shape gives each row the bits that it gets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.attention.runs import Ints, PooledKeys, Prepared, Ragged, Room, Run
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS


def prepare_sdpa(ragged: Ragged, room: Room | None = None) -> Prepared:
    """See attention.Attention. Raises ValueError for a room: its calls follow a batch's runs."""
    if room is not None:
        raise ValueError("sdpa has room for the batch itself only; use a backend of STATIC")
    pages = [_pages(ragged, run) for run in ragged.runs]
    return Prepared([*pages], lambda tensors: partial(_attend, ragged.runs, tensors))


def _pages(ragged: Ragged, run: Run) -> Ints:
    """Pages of a run's keys, row by row; none where a row's keys are its own tokens."""
    if run.first_key is None:
        return ragged.key_slots[:0]
    stop = run.first_key + run.n_rows * run.n_keys
    slots = ragged.key_slots[run.first_key : stop].reshape(run.n_rows, run.n_keys)
    return (slots[:, ::PAGE_TOKENS] // PAGE_TOKENS).reshape(-1)


def _attend(
    runs: Sequence[Run],
    pages: Sequence[Tensor],
    q_THA: Tensor,
    k_TGA: Tensor,
    v_TGA: Tensor,
    pooled: PooledKeys | None,
) -> Tensor:
    parts = []
    for run, its_pages in zip(runs, pages, strict=True):
        if run.first_key is None or pooled is None:
            k_BKGA = _rows(k_TGA[run.start : run.stop], run.n_rows)
            v_BKGA = _rows(v_TGA[run.start : run.stop], run.n_rows)
        else:
            k_BKGA = _gathered(pooled.k_SGA, its_pages, run)
            v_BKGA = _gathered(pooled.v_SGA, its_pages, run)
        o_BHQA = F.scaled_dot_product_attention(
            _rows(q_THA[run.start : run.stop], run.n_rows).transpose(1, 2),
            k_BKGA.transpose(1, 2),
            v_BKGA.transpose(1, 2),
            enable_gqa=q_THA.shape[1] != k_TGA.shape[1],
        )
        parts.append(o_BHQA.transpose(1, 2).reshape(-1, *q_THA.shape[1:]))
    n_padding = len(q_THA) - runs[-1].stop
    if n_padding:
        parts.append(q_THA.new_zeros(n_padding, *q_THA.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gathered(pool_SGA: Tensor, pages: Tensor, run: Run) -> Tensor:
    """Keys or values of a run's rows as BKGA. Whole pages are copied, which is faster than slot by
    slot; what lies behind a row's last key is left out of the view."""
    pool_PSGA: Tensor = pool_SGA.unflatten(0, (-1, PAGE_TOKENS))
    x_PSGA = pool_PSGA.index_select(0, pages)
    return x_PSGA.view(run.n_rows, -1, *pool_SGA.shape[1:])[:, : run.n_keys]


def _rows(x_THA: Tensor, n_rows: int) -> Tensor:
    """Split the flat axis into rows: THA → BQHA, a view."""
    return x_THA.view(n_rows, -1, *x_THA.shape[1:])
