"""Runs one batch through the model: moves its arrays to the device, fills the KV pool, attends.

Knows no request: on more than one device every rank runs the same batches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.attention import Attention, Run
from dilaserve_gpu_worker.engine.batch import Batch
from dilaserve_gpu_worker.engine.kv_pool import KVPool
from dilaserve_gpu_worker.models.model import Model


class Runner:
    """A model, its KV pool (None without a cache) and an attention backend."""

    def __init__(self, model: Model, pool: KVPool | None, attention: Attention) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits NV in fp32 on the device, padding included; no row when none is wanted."""
        write_slots = self._put(batch.write_slots)
        runs = [
            Run(run.n_rows, run.n_queries, run.n_keys, run.start, self._put(run.key_slots))
            for run in batch.runs
        ]

        def attend(layer: int, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor) -> Tensor:
            if self._pool is None or write_slots is None:
                return self._attention(q_THA, k_TGA, v_TGA, None, runs)
            n_tokens = batch.n_tokens
            self._pool.write(layer, write_slots, k_TGA[:n_tokens], v_TGA[:n_tokens])
            return self._attention(q_THA, k_TGA, v_TGA, self._pool.layer(layer), runs)

        tokens_T = torch.from_numpy(batch.tokens_T).to(self._model.device)
        positions_T = torch.from_numpy(batch.positions_T).to(self._model.device)
        logit_rows_N = torch.from_numpy(batch.logit_rows_N).to(self._model.device)
        h_TD = self._model.hidden(tokens_T, positions_T, attend)
        return self._model.logits(h_TD.index_select(0, logit_rows_N))

    def _put(self, values: npt.NDArray[np.int64] | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(self._model.device)
