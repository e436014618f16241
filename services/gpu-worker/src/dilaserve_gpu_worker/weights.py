"""Loading a Hugging Face folder: config.json, safetensors, and where a model's tensors are in it.

Runs no remote code. Everything wrong with a folder is a ModelFolderError with its remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilaserve.errors import ModelFolderError
from dilaserve_gpu_worker.checkpoint import Checkpoint, read_json, weights_hash
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.llada import LayerWeights, LLaDA, Weights

__all__ = ["load_model", "read_config", "weights_hash"]

END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>"})
"""Tokens that end an answer of a chat model without standing in its `eos_token_id`."""

_FIXED_LLADA: dict[str, object] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
}
"""What published LLaDA checkpoints say; another value means another architecture."""


def load_model(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LLaDA:
    """Load the model of a folder. `dtype` None: fp32 on a CPU, elsewhere as stored.

    Raises ModelFolderError for a missing file, shard or tensor, a wrong shape, an unknown
    model_type or architecture, or a missing mask_token_id.
    """
    config = read_config(folder)
    device = torch.device(device)
    with Checkpoint(folder) as checkpoint:
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else checkpoint.dtype
        return LLaDA(config, _llada_weights(_Source(checkpoint, device, dtype), config))


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the token ids that end a text. Raises ModelFolderError."""
    path = folder / "config.json"
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type != "llada":
        raise ModelFolderError(
            f"{path} has model_type {model_type!r}, which is unknown; "
            "use a folder whose model_type is 'llada'"
        )
    return _llada_config(folder, path, raw)


def _llada_config(folder: Path, path: Path, raw: dict[str, Any]) -> ModelConfig:
    for key, known in _FIXED_LLADA.items():
        if raw.get(key) not in (known, None):
            raise ModelFolderError(
                f"{path} has {key} {raw[key]!r}, which the LLaDA code does not compute; "
                f"use a checkpoint with {known!r}"
            )
    raw = _with_derived_sizes(raw)
    config = ModelConfig(
        model_type="llada",
        d_model=_integer(path, raw, "d_model"),
        n_layers=_integer(path, raw, "n_layers"),
        n_heads=_integer(path, raw, "n_heads"),
        n_kv_heads=_integer(path, raw, "n_kv_heads", "n_heads"),
        d_ff=_integer(path, raw, "mlp_hidden_size"),
        vocab_size=_integer(path, raw, "embedding_size", "vocab_size"),
        max_sequence_length=_integer(path, raw, "max_sequence_length"),
        rope_theta=float(raw.get("rope_theta", 10_000.0)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        tied_head=bool(raw.get("weight_tying", False)),
        mask_id=_integer(path, raw, "mask_token_id", least=0),
        eos_ids=_eos_ids(folder, raw),
    )
    _check_sizes(path, config)
    return config


def _with_derived_sizes(raw: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's own defaults for sizes that a config.json may leave null."""
    derived: dict[str, Any] = {}
    if raw.get("mlp_hidden_size") is None and raw.get("mlp_ratio"):
        derived["mlp_hidden_size"] = raw["mlp_ratio"] * raw.get("d_model", 0)
    if raw.get("n_kv_heads") is None and raw.get("multi_query_attention"):
        derived["n_kv_heads"] = 1
    return raw | derived


def _integer(path: Path, raw: dict[str, Any], *keys: str, least: int = 1) -> int:
    """The first of `keys` that is set."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelFolderError(
            f"{path} has {keys[0]} {value!r}; set it to an integer of at least {least}, "
            "as in the published config.json"
        )
    return value


def _check_sizes(path: Path, config: ModelConfig) -> None:
    if config.d_model % config.n_heads or config.head_dim % 2:
        raise ModelFolderError(
            f"{path}: d_model {config.d_model} over n_heads {config.n_heads} is not an even head "
            "width; copy both from the published config.json"
        )
    if config.n_heads % config.n_kv_heads:
        raise ModelFolderError(
            f"{path}: n_heads {config.n_heads} is no multiple of n_kv_heads {config.n_kv_heads}; "
            "copy both from the published config.json"
        )
    if config.mask_id >= config.vocab_size:
        raise ModelFolderError(
            f"{path}: mask_token_id {config.mask_id} is outside the vocabulary of "
            f"{config.vocab_size}; copy both from the published config.json"
        )


def _eos_ids(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Ids of config.json and generation_config.json, and the tokenizer's end-of-turn tokens."""
    generation, tokenizer = folder / "generation_config.json", folder / "tokenizer.json"
    ids = _as_ids(raw.get("eos_token_id"))
    if generation.exists():
        ids |= _as_ids(read_json(generation).get("eos_token_id"))
    if tokenizer.exists():
        added = read_json(tokenizer).get("added_tokens") or []
        ids |= {token["id"] for token in added if token["content"] in END_OF_TURN}
    return frozenset(ids)


def _as_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


class _Source:
    """Tensors of a checkpoint, checked, on the device and in the type wanted."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> Tensor:
        # A copy: the file may change under a mapped tensor, and its alignment in the file must
        # not choose the kernel.
        tensor = self._checkpoint.tensor(f"{name}.weight", shape)
        return tensor.to(self._device, self._dtype, copy=True)

    def stack(self, *parts: tuple[str, int, int]) -> Tensor:
        """Matrices that read the same input, below one another."""
        return torch.cat([self.take(*part) for part in parts])


def _llada_weights(source: _Source, config: ModelConfig) -> Weights:
    v, d = config.vocab_size, config.d_model
    embedding_VD = source.take("model.transformer.wte", v, d)
    return Weights(
        embedding_VD=embedding_VD,
        layers=[_llada_layer(source, config, index) for index in range(config.n_layers)],
        final_norm_D=source.take("model.transformer.ln_f", d),
        head_VD=embedding_VD if config.tied_head else source.take("model.transformer.ff_out", v, d),
    )


def _llada_layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    block = f"model.transformer.blocks.{index}"
    d, f = config.d_model, config.d_ff
    n_kv = config.n_kv_heads * config.head_dim
    return LayerWeights(
        attn_norm_D=source.take(f"{block}.attn_norm", d),
        qkv_XD=source.stack(
            (f"{block}.q_proj", d, d), (f"{block}.k_proj", n_kv, d), (f"{block}.v_proj", n_kv, d)
        ),
        attn_out_DX=source.take(f"{block}.attn_out", d, d),
        ff_norm_D=source.take(f"{block}.ff_norm", d),
        gate_up_YD=source.stack((f"{block}.ff_proj", f, d), (f"{block}.up_proj", f, d)),
        down_DF=source.take(f"{block}.ff_out", d, f),
    )
