"""Reading what a Hugging Face folder says of its model: config.json and who else names tokens.

Opens no weights. Everything wrong with a folder is a ModelFolderError with its remedy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from dilaserve.errors import ModelFolderError
from dilaserve_gpu_worker.model_files import read_json
from dilaserve_gpu_worker.models.config import ModelConfig

__all__ = ["read_config", "shard_config"]

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

_FIXED_DREAM: dict[str, object] = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "use_sliding_window": False,
}
"""Likewise."""

LONGEST_CONTEXT = 1 << 24
"""More positions than any model was trained for: the tables of the rotary embedding hold each."""

DREAM_CONTEXT = 2048
"""Longest sequence that Dream was trained for; its config.json promises more."""


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the token ids that end a text. Raises ModelFolderError."""
    path = folder / "config.json"
    raw = read_json(path)
    _check_unquantized(path, raw)
    model_type = raw.get("model_type")
    if model_type == "llada":
        return _llada_config(folder, path, raw)
    if model_type == "Dream":
        return _dream_config(folder, path, raw)
    raise ModelFolderError(
        f"{path} has model_type {model_type!r}, which is unknown; "
        "use a folder whose model_type is 'llada' or 'Dream'"
    )


def shard_config(config: ModelConfig, degree: int) -> ModelConfig:
    """What one of `degree` ranks computes. Raises ModelFolderError where they do not divide it."""
    sizes = {
        "query heads": config.n_heads,
        "key/value heads": config.n_kv_heads,
        "feed-forward width": config.d_ff,
        "vocabulary": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % degree:
            raise ModelFolderError(
                f"tensor parallelism of degree {degree} does not divide the model's {name} "
                f"({size}); use a degree of {_divisors(math.gcd(*sizes.values()))}"
            )
    return replace(
        config,
        n_heads=config.n_heads // degree,
        n_kv_heads=config.n_kv_heads // degree,
        d_ff=config.d_ff // degree,
    )


def _divisors(size: int) -> str:
    """Such as "1, 2 or 4"."""
    *others, last = [str(n) for n in range(1, size + 1) if size % n == 0]
    return f"{', '.join(others)} or {last}" if others else last


def _llada_config(folder: Path, path: Path, raw: dict[str, Any]) -> ModelConfig:
    _check_architecture(path, raw, "LLaDA", _FIXED_LLADA)
    d_model, n_heads = _integer(path, raw, "d_model"), _integer(path, raw, "n_heads")
    raw = _with_derived_sizes(path, raw)
    vocab_size = _integer(path, raw, "embedding_size", "vocab_size")
    config = ModelConfig(
        model_type="llada",
        d_model=d_model,
        n_layers=_integer(path, raw, "n_layers"),
        n_heads=n_heads,
        n_kv_heads=_integer(path, raw, "n_kv_heads", "n_heads"),
        head_dim=d_model // n_heads,
        d_ff=_integer(path, raw, "mlp_hidden_size"),
        vocab_size=vocab_size,
        max_sequence_length=_integer(path, raw, "max_sequence_length", most=LONGEST_CONTEXT),
        rope_theta=_number(path, raw, "rope_theta", 10_000.0),
        rms_norm_eps=_number(path, raw, "rms_norm_eps", 1e-5),
        tied_head=_flag(path, raw, "weight_tying"),
        mask_id=_integer(path, raw, "mask_token_id", least=0),
        eos_ids=_eos_ids(folder, path, raw, vocab_size),
    )
    _check_sizes(path, config)
    return config


def _dream_config(folder: Path, path: Path, raw: dict[str, Any]) -> ModelConfig:
    _check_architecture(path, raw, "Dream", _FIXED_DREAM)
    d_model = _integer(path, raw, "hidden_size")
    n_heads = _integer(path, raw, "num_attention_heads")
    vocab_size = _integer(path, raw, "vocab_size")
    config = ModelConfig(
        model_type="Dream",
        d_model=d_model,
        n_layers=_integer(path, raw, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=_integer(path, raw, "num_key_value_heads", "num_attention_heads"),
        head_dim=d_model // n_heads,
        d_ff=_integer(path, raw, "intermediate_size"),
        vocab_size=vocab_size,
        max_sequence_length=min(_integer(path, raw, "max_position_embeddings"), DREAM_CONTEXT),
        rope_theta=_number(path, raw, "rope_theta", 10_000.0),
        rms_norm_eps=_number(path, raw, "rms_norm_eps", 1e-6),
        tied_head=_flag(path, raw, "tie_word_embeddings"),
        mask_id=_integer(path, raw, "mask_token_id", least=0),
        eos_ids=_eos_ids(folder, path, raw, vocab_size),
        logit_shift=1,
    )
    _check_sizes(path, config)
    return config


def _check_architecture(
    path: Path, raw: dict[str, Any], name: str, fixed: dict[str, object]
) -> None:
    for key, known in fixed.items():
        if raw.get(key) not in (known, None):
            raise ModelFolderError(
                f"{path} has {key} {raw[key]!r}, which the {name} code does not compute; "
                f"use a checkpoint with {known!r}"
            )


def _check_unquantized(path: Path, raw: dict[str, Any]) -> None:
    """Plain weights may stand beside it: who wrote it computes them quantized, or forgot it."""
    quantization = raw.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    raise ModelFolderError(
        f"{path} has a quantization_config ({method or 'without a quant_method'}), and quantized "
        "weights are not computed here; use the unquantized checkpoint, or remove the field where "
        "the safetensors are unquantized and are to be computed so"
    )


def _with_derived_sizes(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's own defaults for sizes that a config.json may leave null."""
    derived: dict[str, Any] = {}
    if raw.get("mlp_hidden_size") is None and raw.get("mlp_ratio") is not None:
        derived["mlp_hidden_size"] = _integer(path, raw, "mlp_ratio") * raw["d_model"]
    if raw.get("n_kv_heads") is None and raw.get("multi_query_attention"):
        derived["n_kv_heads"] = 1
    return raw | derived


def _integer(
    path: Path, raw: dict[str, Any], *keys: str, least: int = 1, most: int | None = None
) -> int:
    """The first of `keys` that is set."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if not _is_integer(value) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ModelFolderError(
            f"{path} has {keys[0]} {value!r}; set it to an integer {limits}, "
            "as in the published config.json"
        )
    return value


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(path: Path, raw: dict[str, Any], key: str, default: float) -> float:
    value = default if raw.get(key) is None else raw[key]
    if not (_is_integer(value) or isinstance(value, float)) or not 0 < value < math.inf:
        raise ModelFolderError(
            f"{path} has {key} {value!r}; set it to a number above 0, "
            "as in the published config.json"
        )
    return float(value)


def _flag(path: Path, raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise ModelFolderError(
            f"{path} has {key} {value!r}; set it to true or false, as in the published config.json"
        )
    return bool(value)


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


def _eos_ids(folder: Path, path: Path, raw: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Ids of config.json and generation_config.json, and the tokenizer's end-of-turn tokens."""
    generation = folder / "generation_config.json"
    ids = _as_ids(path, raw.get("eos_token_id"), vocab_size)
    ids |= _as_ids(generation, _optional(generation).get("eos_token_id"), vocab_size)
    return frozenset(ids | {i for i, token in _added_tokens(folder) if token in END_OF_TURN})


def _added_tokens(folder: Path) -> list[tuple[int, str]]:
    """Ids and names of the tokens beside the vocabulary, wherever the folder lists them. Raises
    ModelFolderError for a list of another form."""
    readers = {
        "tokenizer.json": _of_tokenizer,
        "tokenizer_config.json": _of_tokenizer_config,
        "added_tokens.json": _of_added_tokens,
    }
    added = []
    for name, read in readers.items():
        try:
            added += read(_optional(folder / name))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"{folder / name} lists its added tokens in a form that is not known "
                f"({type(error).__name__}: {error}); download it again"
            ) from error
    return added


def _of_tokenizer(fields: dict[str, Any]) -> list[tuple[int, str]]:
    return [(int(token["id"]), token["content"]) for token in fields.get("added_tokens") or []]


def _of_tokenizer_config(fields: dict[str, Any]) -> list[tuple[int, str]]:
    decoder = fields.get("added_tokens_decoder") or {}
    return [(int(token_id), token["content"]) for token_id, token in decoder.items()]


def _of_added_tokens(fields: dict[str, Any]) -> list[tuple[int, str]]:
    return [(int(token_id), name) for name, token_id in fields.items()]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _as_ids(path: Path, value: object, vocab_size: int) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            raise ModelFolderError(
                f"{path} has eos_token_id {value!r}; set it to a token id or a list of them, "
                "as in the published file"
            )
        if token_id >= vocab_size:
            raise ModelFolderError(
                f"{path} has eos_token_id {value!r}, outside the vocabulary of {vocab_size}, so "
                "that no answer would end with it; copy the published file"
            )
    return set(ids)
