"""Runs one batch through the model: moves its arrays to the device, fills the KV pool, attends.

Knows no request: on more than one device every rank runs the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilaserve_gpu_worker.attention import Attention, PooledKeys, Ragged
from dilaserve_gpu_worker.engine.batch import MIN_ROWS, Batch
from dilaserve_gpu_worker.engine.kv_pool import KVPool
from dilaserve_gpu_worker.engine.sequence import Ints
from dilaserve_gpu_worker.engine.unmask import best_confidence
from dilaserve_gpu_worker.models.model import Model

_OUTLOOK_ELEMENTS = 1 << 26
"""Logits that are looked at at a time for their confidence only, which bounds their memory."""


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
        write_slots = self._put(batch.write_slots)
        ragged = Ragged(batch.runs, batch.write_slots, batch.key_slots)
        attention = self._attention(ragged, self._model.device)

        def attend(layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
            if self._pool is None:
                return attention(q_THA, k_TGA, v_TGA, None)
            n_tokens = batch.n_tokens
            self._pool.write(layer, write_slots, k_TGA[:n_tokens], v_TGA[:n_tokens])
            return attention(q_THA, k_TGA, v_TGA, PooledKeys(*self._pool.layer(layer)))

        h_TD = self._model.hidden(self._put(batch.tokens_T), self._put(batch.positions_T), attend)
        logits_MV = self._model.logits(h_TD.index_select(0, self._put(batch.logit_rows_M)))
        return Scores(logits_MV, self._outlook(h_TD, self._put(batch.outlook_rows_K)))

    def _outlook(self, h_TD: Tensor, rows_K: Tensor) -> Tensor:
        n_fit = _OUTLOOK_ELEMENTS // self._model.config.vocab_size
        parts = rows_K.split(max(1, n_fit // MIN_ROWS) * MIN_ROWS)
        return torch.cat(
            [
                best_confidence(self._model.logits(h_TD.index_select(0, rows)), self._mask_id)
                for rows in parts
            ]
        )

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)
