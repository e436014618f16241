"""Loading a model of a Hugging Face folder: its tensors, and which part of them a rank needs.

Runs no remote code. Everything wrong with a folder is a ModelFolderError with its remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dilaserve.errors import ModelFolderError
from dilaserve_gpu_worker.checkpoint import Checkpoint
from dilaserve_gpu_worker.device import can_fuse, default_dtype
from dilaserve_gpu_worker.layout import beyond_last, block_names, tensor_shapes, top_names
from dilaserve_gpu_worker.model_config import read_config, shard_config
from dilaserve_gpu_worker.model_files import weights_hash
from dilaserve_gpu_worker.models.blocks import LayerWeights, Weights
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.dream import Dream
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.peers import Alone, Peers
from dilaserve_gpu_worker.models.products import packed, packing_pays

__all__ = ["load_model", "read_config", "shard_config", "weights_hash"]


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    peers: Peers | None = None,
    packs: bool = True,
    fuses: bool = True,
) -> Model:
    """Load the model of a folder, or the slice of it that is this rank's among `peers`: no more is
    ever copied out of the mapped files. `dtype` None: see device.default_dtype. `packs`: matrices
    are packed where that pays (see models.products). `fuses`: our own kernels run between products
    and attention where they can (see kernels); the bits are the same.

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
        packs = packs and packing_pays(device, dtype)
        source = _Source(checkpoint, tensor_shapes(config), device, dtype, peers, packs)
        checkpoint.check_ends_before(beyond_last(config))
        weights = _weights(source, config)
    architecture = Dream if config.model_type == "Dream" else LLaDA
    return architecture(shard, weights, peers, is_fused=fuses and can_fuse(device, dtype))


class _Source:
    """Tensors of a checkpoint, checked, on the device and in the type wanted; sliced for a rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        peers: Peers,
        packs: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        self._peers = peers
        self._packs = packs

    def whole(self, name: str) -> Tensor:
        """A vector that every rank needs."""
        return self._take(name, ())

    def rows(self, name: str) -> Tensor:
        """A matrix or vector, split by rows."""
        return self._take(name, (self._part(self._shapes[name][0]),))

    def columns(self, name: str) -> Tensor:
        """A matrix, split by columns."""
        return self._take(name, (slice(None), self._part(self._shapes[name][1])))

    def stack(self, *names: str) -> Tensor:
        """Matrices that read the same input, each split by rows, below one another."""
        return torch.cat([self.rows(name) for name in names])

    def matrix(self, tensor: Tensor) -> Tensor:
        """One that is multiplied with, packed if that is wanted."""
        return packed(tensor) if self._packs else tensor

    def _part(self, size: int) -> slice:
        width = size // self._peers.degree
        return slice(self._peers.rank * width, (self._peers.rank + 1) * width)

    def _take(self, name: str, part: tuple[slice, ...]) -> Tensor:
        # A copy: the file may change under a mapped tensor, and its alignment in the file must
        # not choose the kernel.
        tensor = self._checkpoint.tensor(name, self._shapes[name], part)
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


def _weights(source: _Source, config: ModelConfig) -> Weights:
    top = top_names(config)
    embedding_VD = source.rows(top.embedding)
    return Weights(
        embedding_VD=embedding_VD,
        layers=[_layer(source, config, index) for index in range(config.n_layers)],
        final_norm_D=source.whole(top.final_norm),
        head_VD=source.matrix(embedding_VD if config.tied_head else source.rows(top.head)),
    )


def _layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    names = block_names(config, index)
    qkv = (names.q, names.k, names.v)
    has_bias = config.model_type == "Dream"
    return LayerWeights(
        attn_norm_D=source.whole(f"{names.attn_norm}.weight"),
        qkv_XD=source.matrix(source.stack(*(f"{name}.weight" for name in qkv))),
        qkv_bias_X=source.stack(*(f"{name}.bias" for name in qkv)) if has_bias else None,
        attn_out_DX=source.matrix(source.columns(f"{names.attn_out}.weight")),
        ff_norm_D=source.whole(f"{names.ff_norm}.weight"),
        gate_up_YD=source.matrix(source.stack(f"{names.gate}.weight", f"{names.up}.weight")),
        down_DF=source.matrix(source.columns(f"{names.down}.weight")),
    )
