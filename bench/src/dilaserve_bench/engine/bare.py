"""The matrix products and the attention of a pass, and nothing else: what an engine costs beyond
them is its own. Shape letters: dilaserve_gpu_worker.models.model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dilaserve_gpu_worker.attention import Run
from dilaserve_gpu_worker.engine.batch import Batch
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.products import linear, packed

__all__ = ["BareProducts"]

GAIN = 0.02
"""Of the random weights: values stay ordinary numbers."""


class BareProducts:
    """Weights of a model's shapes, in its type and on its device, shared by no layer; packed as
    the engine's may be, or as torch multiplies with them by itself."""

    def __init__(self, model: Model, *, is_packed: bool = False) -> None:
        config = model.config
        self._config = config
        self.shift = config.logit_shift
        """Of the model's batches."""
        self._device, self._dtype = model.device, model.dtype
        d, f = config.d_model, config.d_ff
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        shapes = [(n_q + 2 * n_kv, d), (d, n_q), (2 * f, d), (d, f)]
        lay = packed if is_packed else _as_it_is
        self._layers = [
            [lay(self._random(*shape)) for shape in shapes] for _ in range(config.n_layers)
        ]
        self._head_VD = lay(self._random(config.vocab_size, d))
        self._scratch = self._random(1)
        self._pools = [self._random(1) for _ in range(config.n_layers)]
        """Keys and values that a pass does not compute, of each layer its own, as a cache has."""

    @torch.inference_mode()
    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Make room for all of them, which is none of the work, and run the first."""
        n_pooled = max(sum(map(self._n_pooled, batch.runs)) for batch in batches)
        if n_pooled > len(self._pools[0]):
            self._pools = [self._random(n_pooled) for _ in self._pools]
        self._inputs((max(map(self._n_inputs, batches)),))
        self.run(batches[0])

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """Those of one pass, on inputs that lie ready in one piece; behind the last attention, as
        in a pass, of the tokens alone whose logits or confidence are wanted."""
        n_all, heads = len(batch.tokens_T), (len(batch.logit_rows_M), len(batch.outlook_rows_K))
        for index, (qkv_XD, attn_out_DX, gate_up_YD, down_DF) in enumerate(self._layers):
            linear(self._inputs((n_all, self._config.d_model))[0], qkv_XD)
            self._attend_all(index, batch.runs)
            n = n_all if index + 1 < len(self._layers) else sum(heads)
            x_TD, o_TX, ff_TF = self._inputs(
                (n, self._config.d_model),
                (n, self._config.n_heads * self._config.head_dim),
                (n, self._config.d_ff),
            )
            linear(o_TX, attn_out_DX)
            linear(x_TD, gate_up_YD)
            linear(ff_TF, down_DF)
        for n in heads:
            linear(self._inputs((n, self._config.d_model))[0], self._head_VD)

    def _attend_all(self, index: int, runs: Sequence[Run]) -> None:
        """Keys that a pass computes itself lie ready, too; others in the layer's pool, run by run,
        which is read once in a pass."""
        config, first = self._config, 0
        for run in runs:
            queries = (run.n_rows, config.n_heads, run.n_queries, config.head_dim)
            keys = (run.n_rows, config.n_kv_heads, run.n_keys, config.head_dim)
            q_BHQA, k_BGKA, v_BGKA = self._inputs(queries, keys, keys)
            if n := self._n_pooled(run):
                k_BGKA, v_BGKA = self._pools[index][first : first + n].view(2, *keys)
                first += n
            F.scaled_dot_product_attention(
                q_BHQA, k_BGKA, v_BGKA, enable_gqa=config.n_heads != config.n_kv_heads
            )

    def _n_inputs(self, batch: Batch) -> int:
        """No less than what any of its products and attentions takes."""
        config, n = self._config, len(batch.tokens_T)
        width = config.d_model + config.n_heads * config.head_dim + config.d_ff
        of_keys = 2 * config.n_kv_heads * config.head_dim
        return n * width + sum(run.n_rows * run.n_keys * of_keys for run in batch.runs)

    def _n_pooled(self, run: Run) -> int:
        """Elements of its keys and values in the pool."""
        per_key = 2 * self._config.n_kv_heads * self._config.head_dim
        return 0 if run.first_key is None else run.n_rows * run.n_keys * per_key

    def _inputs(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """One piece of memory after the other."""
        sizes = [math.prod(shape) for shape in shapes]
        if sum(sizes) > len(self._scratch):
            self._scratch = self._random(sum(sizes))
        pieces = self._scratch[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _random(self, *shape: int) -> Tensor:
        return GAIN * torch.randn(shape, device=self._device, dtype=self._dtype)


def _as_it_is(matrix: Tensor) -> Tensor:
    return matrix
