"""Runs one batch through the model: moves its arrays to the device, fills the KV pool, attends.

Knows no request: on more than one device every rank runs the same batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilaserve_gpu_worker.attention import Attention, PooledKeys
from dilaserve_gpu_worker.engine.batch import Batch
from dilaserve_gpu_worker.engine.kv_pool import KVPool
from dilaserve_gpu_worker.engine.sequence import Ints
from dilaserve_gpu_worker.models.model import Model


class Runner:
    """A model, its KV pool (None without a cache) and an attention backend."""

    def __init__(self, model: Model, pool: KVPool | None, attention: Attention) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits MV in fp32 on the device, padding included; no row when none is wanted."""
        write_slots = self._put(batch.write_slots)
        key_slots = self._put(batch.key_slots)

        def attend(layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
            if self._pool is None:
                return self._attention(q_THA, k_TGA, v_TGA, None, batch.runs)
            n_tokens = batch.n_tokens
            self._pool.write(layer, write_slots, k_TGA[:n_tokens], v_TGA[:n_tokens])
            pooled = PooledKeys(*self._pool.layer(layer), key_slots)
            return self._attention(q_THA, k_TGA, v_TGA, pooled, batch.runs)

        h_TD = self._model.hidden(self._put(batch.tokens_T), self._put(batch.positions_T), attend)
        return self._model.logits(h_TD.index_select(0, self._put(batch.logit_rows_M)))

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)
