"""Runs one batch through the model: moves its arrays to the device, fills the KV pool, attends.

Knows no request: on more than one device every rank runs the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilaserve_gpu_worker.attention import Attention, LayerAttention, PooledKeys, Ragged
from dilaserve_gpu_worker.engine.batch import MIN_ROWS, Batch
from dilaserve_gpu_worker.engine.kv_pool import KVPool
from dilaserve_gpu_worker.engine.unmask import best_confidence
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.transfer import Array, put

_OUTLOOK_ELEMENTS = 1 << 26
"""Logits that are looked at at a time for their confidence only, which bounds their memory."""

N_ARRAYS = 5
"""Of a batch, before those of attention."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass says of the masked positions, on the device, padding included."""

    logits_MV: Tensor
    """fp32, of the batch's `logit_rows_M`."""
    outlook_K: Tensor
    """Confidences of the batch's `outlook_rows_K`."""


class Runner:
    """A model, its KV pool (None without a cache) and an attention backend."""

    def __init__(
        self, model: Model, pool: KVPool | None, attention: Attention, *, mask_id: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._mask_id = mask_id

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Scores:
        """Run the model, and fill the pool."""
        prepared = self._attention(Ragged(batch.runs, batch.write_slots, batch.key_slots))
        tensors = put([*_arrays(batch), *prepared.arrays], self._model.device)
        tokens_T, positions_T, write_slots, logit_rows_M, outlook_rows_K = tensors[:N_ARRAYS]
        attention = prepared.bind(tensors[N_ARRAYS:])
        h_TD = self._hidden(tokens_T, positions_T, write_slots, attention)
        logits_MV = self._model.logits(h_TD.index_select(0, logit_rows_M))
        return Scores(logits_MV, self._outlook(h_TD, outlook_rows_K))

    def _hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        write_slots: Tensor,
        attention: LayerAttention,
    ) -> Tensor:
        pool, n_tokens = self._pool, len(write_slots)

        def attend(layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
            if pool is None:
                return attention(q_THA, k_TGA, v_TGA, None)
            pool.write(layer, write_slots, k_TGA[:n_tokens], v_TGA[:n_tokens])
            return attention(q_THA, k_TGA, v_TGA, PooledKeys(*pool.layer(layer)))

        return self._model.hidden(tokens_T, positions_T, attend)

    def _outlook(self, h_TD: Tensor, rows_K: Tensor) -> Tensor:
        n_fit = _OUTLOOK_ELEMENTS // self._model.config.vocab_size
        parts = rows_K.split(max(1, n_fit // MIN_ROWS) * MIN_ROWS)
        return torch.cat(
            [
                best_confidence(self._model.logits(h_TD.index_select(0, rows)), self._mask_id)
                for rows in parts
            ]
        )


def _arrays(batch: Batch) -> list[Array]:
    """What the device must be given of a batch, beside what attention wants."""
    return [
        batch.tokens_T,
        batch.positions_T,
        batch.write_slots,
        batch.logit_rows_M,
        batch.outlook_rows_K,
    ]
