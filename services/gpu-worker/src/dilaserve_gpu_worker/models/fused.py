"""A transformer's blocks on a CPU in float32, with all between products and attention fused into
our own kernels (decision 0020), over chunks of tokens that stay in the processor's caches.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dilaserve_gpu_worker.kernels import Floats, Ints, compile_kernels
from dilaserve_gpu_worker.models.blocks import Weights
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Attend
from dilaserve_gpu_worker.models.parts import rms_norm, rotary_tables
from dilaserve_gpu_worker.models.peers import Peers
from dilaserve_gpu_worker.models.products import linear

CHUNK, MULTIPLE = 1024, 32
"""Most tokens, and of what their number is a multiple. With few products are slower, with all of a
long pass its arrays leave the caches (measured with the tiny model, 256 to 3,584 tokens)."""


class FusedBlocks:
    """See blocks.Blocks."""

    def __init__(self, config: ModelConfig, weights: Weights, peers: Peers) -> None:
        self._config = config
        self._layers = weights.layers
        self._peers = peers
        self._kernels = compile_kernels(
            d_model=config.d_model,
            head_dim=config.head_dim,
            n_rotated=config.n_heads + config.n_kv_heads,
        )
        cos_PA, sin_PA = rotary_tables(config, weights.embedding_VD.device)
        self._cos_PA, self._sin_PA = cos_PA.numpy(), sin_PA.numpy()
        self._eps = np.float32(config.rms_norm_eps)
        self._attn_norms = [layer.attn_norm_D.numpy() for layer in weights.layers]
        self._ff_norms = [layer.ff_norm_D.numpy() for layer in weights.layers]

    def run(
        self, h_TD: Tensor, positions_T: Tensor, attend: Attend, wanted_N: Tensor | None
    ) -> Tensor:
        """See blocks.Blocks."""
        heads = self._config.n_heads, self._config.n_kv_heads, self._config.n_kv_heads
        qkv_TXA = h_TD.new_empty(len(h_TD), sum(heads), self._config.head_dim)
        q_THA, k_TGA, v_TGA = qkv_TXA.split(heads, dim=1)
        qkv_TX, positions = qkv_TXA.flatten(1).numpy(), positions_T.numpy()
        chunks = self._chunks(h_TD)
        for chunk in chunks:
            norm_D = self._layers[0].attn_norm_D
            x_CD = rms_norm(chunk.h_CD, norm_D, self._config.rms_norm_eps)
            self._project(0, x_CD, positions[chunk.part], qkv_TX[chunk.part])
        last = len(self._layers) - 1
        for index in range(last):
            o_TX = attend(index, q_THA, k_TGA, v_TGA).flatten(1)
            for chunk in chunks:
                delta_CD = self._feed(index, chunk, o_TX[chunk.part])
                self._add_norm(chunk, delta_CD, self._attn_norms[index + 1])
                self._project(index + 1, chunk.x_CD, positions[chunk.part], qkv_TX[chunk.part])
        o_TX = attend(last, q_THA, k_TGA, v_TGA).flatten(1)
        if wanted_N is not None:
            h_TD, o_TX = h_TD.index_select(0, wanted_N), o_TX.index_select(0, wanted_N)
        for chunk in self._chunks(h_TD):
            chunk.h_CD.add_(self._feed(last, chunk, o_TX[chunk.part]))
        return h_TD

    def _chunks(self, h_TD: Tensor) -> list[_Chunk]:
        """Of one size, where that can be. Of several ranks each takes all tokens at once: they wait
        for each other at every sum."""
        n_chunks = -(-len(h_TD) // CHUNK) if self._peers.degree == 1 else 1
        n_tokens = -(-len(h_TD) // max(n_chunks * MULTIPLE, 1)) * MULTIPLE
        x_CD = h_TD.new_empty(n_tokens, h_TD.shape[1])
        ff_CF = h_TD.new_empty(n_tokens, self._config.d_ff)
        starts = range(0, len(h_TD), n_tokens or 1)
        return [_Chunk(h_TD, x_CD, ff_CF, slice(start, start + n_tokens)) for start in starts]

    def _project(self, index: int, x_CD: Tensor, positions_C: Ints, out_CX: Floats) -> None:
        """Queries, keys and values of the normed input of a layer."""
        layer = self._layers[index]
        qkv_CX = linear(x_CD, layer.qkv_XD, layer.qkv_bias_X).numpy()
        self._kernels.rotate(qkv_CX, positions_C, self._cos_PA, self._sin_PA, out_CX)

    def _feed(self, index: int, chunk: _Chunk, o_CX: Tensor) -> Tensor:
        """Add the mixed values of a layer, and say what its second half adds."""
        layer, reduce = self._layers[index], self._peers.reduce
        self._add_norm(chunk, reduce(linear(o_CX, layer.attn_out_DX)), self._ff_norms[index])
        self._kernels.swiglu(linear(chunk.x_CD, layer.gate_up_YD).numpy(), chunk.ff)
        return reduce(linear(chunk.ff_CF, layer.down_DF))

    def _add_norm(self, chunk: _Chunk, delta_CD: Tensor, weight_D: Floats) -> None:
        self._kernels.add_norm(chunk.h, delta_CD.numpy(), weight_D, self._eps, chunk.x)


class _Chunk:
    """Consecutive tokens: their hidden states, and room, which chunks share, for the normed input
    of a product and for what lies between gate and down; for torch, and for the kernels."""

    __slots__ = ("ff", "ff_CF", "h", "h_CD", "part", "x", "x_CD")

    def __init__(self, h_TD: Tensor, x_CD: Tensor, ff_CF: Tensor, part: slice) -> None:
        self.part = part
        self.h_CD = h_TD[part]
        self.x_CD, self.ff_CF = x_CD[: len(self.h_CD)], ff_CF[: len(self.h_CD)]
        self.h: Floats = self.h_CD.numpy()
        self.x: Floats = self.x_CD.numpy()
        self.ff: Floats = self.ff_CF.numpy()
