"""Runs one batch through the model: moves its arrays to the device, fills the KV pool, attends.

Knows no request: on more than one device every rank runs the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dilaserve_gpu_worker.attention import (
    PAGED,
    STATIC,
    Attention,
    PooledKeys,
    Prepared,
    Ragged,
    attention_backend,
)
from dilaserve_gpu_worker.engine.batch import MIN_ROWS, Batch
from dilaserve_gpu_worker.engine.graphs import GraphOptions, GraphShapes, StepGraphs, padded
from dilaserve_gpu_worker.engine.kv_pool import KVPool
from dilaserve_gpu_worker.engine.unmask import best_confidence
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.transfer import Array, StaticArrays, put

if TYPE_CHECKING:
    from dilaserve_gpu_worker.kernels import Store

_OUTLOOK_ELEMENTS = 1 << 26
"""Logits that are looked at at a time for their confidence only, which bounds their memory."""

N_ARRAYS, WANTED = 4, 3
"""See `_arrays`: how many there are before those of attention, and which says what is wanted."""


@dataclass(frozen=True, slots=True)
class PaddedGraphs:
    """Captured passes, and how others are padded to them."""

    shapes: GraphShapes
    graphs: StepGraphs
    scratch_page: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass says of the masked positions, on the device, padding included."""

    logits_MV: Tensor
    """fp32, of the batch's `logit_rows_M`."""
    outlook_K: Tensor
    """Confidences of the batch's `outlook_rows_K`."""


class Runner:
    """A model, its KV pool (None without a cache) and an attention backend. `graphs`: those of
    passes that are captured, and the pool's page that pads them."""

    def __init__(
        self,
        model: Model,
        pool: KVPool | None,
        attention: Attention,
        *,
        mask_id: int,
        graphs: PaddedGraphs | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._mask_id = mask_id
        self._graphs = graphs

    @property
    def n_replays(self) -> int:
        """Batches that were replayed."""
        return self._graphs.graphs.n_replays if self._graphs else 0

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Scores:
        """Run the model, and fill the pool."""
        h_ND = self._replayed(batch)
        if h_ND is None:
            h_ND = self._computed(batch)
        n_logits, n_outlook = len(batch.logit_rows_M), len(batch.outlook_rows_K)
        logits_MV = self._model.logits(h_ND[:n_logits])
        return Scores(logits_MV, self._outlook(h_ND[n_logits : n_logits + n_outlook]))

    def _computed(self, batch: Batch) -> Tensor:
        """Last hidden states of the batch's logit rows and outlook rows."""
        prepared = self._attention(_ragged(batch))
        tensors = put([*_arrays(batch), *prepared.arrays], self._model.device)
        return self._hidden(prepared, tensors, tensors[WANTED])

    def _replayed(self, batch: Batch) -> Tensor | None:
        """The same for a pass that is captured, or is to be captured now; else None. What is
        captured computes all tokens, whichever are wanted."""
        if self._graphs is None:
            return None
        room = self._graphs.shapes.room_for(batch)
        if room is None or not self._graphs.graphs.wants(room):
            return None
        wide = padded(batch, room, self._graphs.scratch_page)
        prepared = self._attention(_ragged(wide), room)
        h_TD, tensors = self._graphs.graphs.run(
            room,
            [*_arrays(wide), *prepared.arrays],
            partial(self._hidden, prepared),
            partial(StaticArrays, device=self._model.device),
        )
        return h_TD.index_select(0, tensors[WANTED])

    def _hidden(
        self, prepared: Prepared, tensors: Sequence[Tensor], wanted_N: Tensor | None = None
    ) -> Tensor:
        tokens_T, positions_T, write_slots = tensors[:WANTED]
        attention = prepared.bind(tensors[N_ARRAYS:])
        pool, n_tokens = self._pool, len(write_slots)

        def attend(layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
            if pool is None:
                return attention(q_THA, k_TGA, v_TGA, None)
            pool.write(layer, write_slots, k_TGA[:n_tokens], v_TGA[:n_tokens])
            return attention(q_THA, k_TGA, v_TGA, PooledKeys(*pool.layer(layer)))

        return self._model.hidden(tokens_T, positions_T, attend, wanted_N)

    def _outlook(self, h_KD: Tensor) -> Tensor:
        n_fit = _OUTLOOK_ELEMENTS // self._model.config.vocab_size
        parts = h_KD.split(max(1, n_fit // MIN_ROWS) * MIN_ROWS)
        return torch.cat(
            [best_confidence(self._model.logits(part_ND), self._mask_id) for part_ND in parts]
        )


def make_runner(
    model: Model,
    n_pages: int | None,
    attention: str,
    *,
    mask_id: int,
    graphs: GraphOptions | None = None,
) -> Runner:
    """With a pool of `n_pages` pages (None: without one), and one more where passes are captured,
    which needs a pool, an attention backend of attention.STATIC and torch's own operators.
    `attention` is its name."""
    backend = attention_backend(attention)
    if n_pages is None:
        return Runner(model, None, backend, mask_id=mask_id)
    padding = None
    if graphs is not None:
        if attention not in STATIC:
            raise ValueError(f"attention backend {attention!r} cannot be captured; use {STATIC}")
        if model.is_fused:
            raise ValueError("fused kernels cannot be captured; load the model without them")
        shapes = GraphShapes(
            block_length=graphs.block_length,
            max_rows=graphs.max_rows,
            longest_key=model.config.max_sequence_length,
            counts_keys=attention not in PAGED,
        )
        padding = PaddedGraphs(shapes, StepGraphs(graphs), scratch_page=n_pages)
    n_all = n_pages + (padding is not None)
    pool = KVPool(
        model.config, n_all, device=model.device, dtype=model.dtype, store=_store_of(model)
    )
    return Runner(model, pool, backend, mask_id=mask_id, graphs=padding)


def _store_of(model: Model) -> Store | None:
    if not model.is_fused:
        return None
    from dilaserve_gpu_worker.kernels import compile_store  # and with it numba

    return compile_store()


def _ragged(batch: Batch) -> Ragged:
    return Ragged(batch.runs, batch.write_slots, batch.key_slots)


def _arrays(batch: Batch) -> list[Array]:
    """What the device must be given of a batch, beside what attention wants."""
    return [
        batch.tokens_T,
        batch.positions_T,
        batch.write_slots,
        np.concatenate([batch.logit_rows_M, batch.outlook_rows_K]),
    ]
