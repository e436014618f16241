"""Loading a model of a Hugging Face folder: where its tensors are, and which part a rank needs.

Runs no remote code. Everything wrong with a folder is a ModelFolderError with its remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilaserve.errors import ModelFolderError
from dilaserve_gpu_worker.checkpoint import Checkpoint
from dilaserve_gpu_worker.device import default_dtype
from dilaserve_gpu_worker.model_config import read_config, shard_config
from dilaserve_gpu_worker.model_files import weights_hash
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.dream import Dream
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.peers import Alone, Peers
from dilaserve_gpu_worker.models.products import packed, packing_pays
from dilaserve_gpu_worker.models.transformer import LayerWeights, Weights

__all__ = ["load_model", "read_config", "shard_config", "weights_hash"]


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    peers: Peers | None = None,
    packs: bool = True,
) -> Model:
    """Load the model of a folder, or the slice of it that is this rank's among `peers`: no more is
    ever copied out of the mapped files. `dtype` None: see device.default_dtype. `packs`: matrices
    are packed where that pays (see models.products).

    Raises ModelFolderError for a missing file, shard or tensor, a wrong shape or type, a layer too
    many, an unknown model_type or architecture, a missing mask_token_id, or sizes that the ranks
    do not divide.
    """
    config = read_config(folder)
    peers = peers or Alone()
    device = torch.device(device)
    shard = shard_config(config, peers.degree)
    with Checkpoint(folder) as checkpoint:
        dtype = dtype or default_dtype(device, checkpoint.dtype)
        source = _Source(checkpoint, device, dtype, peers, packs and packing_pays(device, dtype))
        if config.model_type == "Dream":
            return Dream(shard, _dream_weights(source, config), peers)
        return LLaDA(shard, _llada_weights(source, config), peers)


class _Source:
    """Tensors of a checkpoint, checked, on the device and in the type wanted; sliced for a rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        peers: Peers,
        packs: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._peers = peers
        self._packs = packs

    def whole(self, name: str, size: int) -> Tensor:
        """A vector that every rank needs."""
        return self._take(name, (size,), ())

    def rows(self, name: str, *shape: int) -> Tensor:
        """A matrix or vector, split by rows."""
        return self._take(name, shape, (self._part(shape[0]),))

    def columns(self, name: str, n_rows: int, n_columns: int) -> Tensor:
        """A matrix, split by columns."""
        return self._take(name, (n_rows, n_columns), (slice(None), self._part(n_columns)))

    def stack(self, *parts: tuple[str, *tuple[int, ...]]) -> Tensor:
        """Matrices that read the same input, each split by rows, below one another."""
        return torch.cat([self.rows(*part) for part in parts])

    def matrix(self, tensor: Tensor) -> Tensor:
        """One that is multiplied with, packed if that is wanted."""
        return packed(tensor) if self._packs else tensor

    def end_before(self, block: str) -> None:
        """Raises ModelFolderError where the checkpoint holds `block`, beyond config.json's last:
        it would be left out silently."""
        name = f"{block}.weight"
        if self._checkpoint.has(name):
            raise ModelFolderError(
                f"{self._checkpoint.folder} holds {name}, beyond the last layer of config.json; "
                "they do not belong together: download both again"
            )

    def _part(self, size: int) -> slice:
        width = size // self._peers.degree
        return slice(self._peers.rank * width, (self._peers.rank + 1) * width)

    def _take(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        # A copy: the file may change under a mapped tensor, and its alignment in the file must
        # not choose the kernel.
        tensor = self._checkpoint.tensor(name, shape, part)
        tensor = tensor.to(self._device, self._dtype, copy=True).contiguous()
        _check_finite(self._checkpoint.folder, name, tensor)
        return tensor


def _check_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """At the start, not by a request: attention may hide a NaN from its logits."""
    bounds = torch.stack(tensor.aminmax())
    if not bool(torch.isfinite(bounds).all()):
        raise ModelFolderError(
            f"{folder}: tensor {name} holds NaN or infinity in "
            f"{str(tensor.dtype).removeprefix('torch.')}; "
            "download the folder again, or set DILASERVE_DTYPE=float32 where it exceeds 16 bits"
        )


@dataclass(frozen=True, slots=True)
class _Names:
    """Tensors of one block, without `.weight`."""

    attn_norm: str
    q: str
    k: str
    v: str
    attn_out: str
    ff_norm: str
    gate: str
    up: str
    down: str


def _llada_weights(source: _Source, config: ModelConfig) -> Weights:
    v, d = config.vocab_size, config.d_model
    embedding_VD = source.rows("model.transformer.wte.weight", v, d)
    source.end_before(_llada_names(config.n_layers).attn_norm)
    layers = [
        LayerWeights(**_block(source, config, _llada_names(i)), qkv_bias_X=None)
        for i in range(config.n_layers)
    ]
    return Weights(
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=source.whole("model.transformer.ln_f.weight", d),
        head_VD=source.matrix(
            embedding_VD
            if config.tied_head
            else source.rows("model.transformer.ff_out.weight", v, d)
        ),
    )


def _llada_names(index: int) -> _Names:
    names = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj")
    return _Names(*(f"model.transformer.blocks.{index}.{name}" for name in (*names, "ff_out")))


def _dream_weights(source: _Source, config: ModelConfig) -> Weights:
    v, d = config.vocab_size, config.d_model
    embedding_VD = source.rows("model.embed_tokens.weight", v, d)
    source.end_before(f"model.layers.{config.n_layers}.input_layernorm")
    return Weights(
        embedding_VD=embedding_VD,
        layers=[_dream_layer(source, config, index) for index in range(config.n_layers)],
        final_norm_D=source.whole("model.norm.weight", d),
        head_VD=source.matrix(
            embedding_VD if config.tied_head else source.rows("lm_head.weight", v, d)
        ),
    )


def _dream_layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    block = f"model.layers.{index}"
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
    names = _Names(
        attn_norm=f"{block}.input_layernorm",
        q=f"{attention}.q_proj",
        k=f"{attention}.k_proj",
        v=f"{attention}.v_proj",
        attn_out=f"{attention}.o_proj",
        ff_norm=f"{block}.post_attention_layernorm",
        gate=f"{mlp}.gate_proj",
        up=f"{mlp}.up_proj",
        down=f"{mlp}.down_proj",
    )
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    bias_X = source.stack(
        (f"{names.q}.bias", n_q), (f"{names.k}.bias", n_kv), (f"{names.v}.bias", n_kv)
    )
    return LayerWeights(**_block(source, config, names), qkv_bias_X=bias_X)


def _block(source: _Source, config: ModelConfig, names: _Names) -> dict[str, Tensor]:
    """What the blocks of both families have."""
    d, f = config.d_model, config.d_ff
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "attn_norm_D": source.whole(f"{names.attn_norm}.weight", d),
        "qkv_XD": source.matrix(
            source.stack(
                (f"{names.q}.weight", n_q, d),
                (f"{names.k}.weight", n_kv, d),
                (f"{names.v}.weight", n_kv, d),
            )
        ),
        "attn_out_DX": source.matrix(source.columns(f"{names.attn_out}.weight", d, n_q)),
        "ff_norm_D": source.whole(f"{names.ff_norm}.weight", d),
        "gate_up_YD": source.matrix(
            source.stack((f"{names.gate}.weight", f, d), (f"{names.up}.weight", f, d))
        ),
        "down_DF": source.matrix(source.columns(f"{names.down}.weight", d, f)),
    }
