"""What the gateway knows of the model that is served: its name, limits and vocabulary.

Reads config.json and generation_config.json; opens no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilaserve.errors import ModelFolderError
from dilaserve_gateway.template import ChatTemplate, load_template
from dilaserve_gateway.tokenizer import ModelTokenizer, load_tokenizer, read_json

DEFAULT_OUTPUT = 256
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>")
"""Chat models end with these, though their config.json names another token (LLaDA, Dream)."""
_USABLE_CONTEXT = {"Dream": 2048}
"""Where max_position_embeddings promises more than the model was trained for."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of a model folder. Lengths in tokens."""

    id: str
    context_length: int
    """Prompt and canvas together."""
    vocab_size: int
    eos_ids: frozenset[int]
    default_output: int
    """Canvas length where the client gives none."""
    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    doubts: tuple[str, ...] = ()
    """What may be wrong with the folder, and is no reason to refuse it."""


def load_model(folder: Path, name: str = "") -> ServedModel:
    """Read a folder in the Hugging Face layout. Raises ModelFolderError."""
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", missing_ok=True)
    tokenizer = load_tokenizer(folder)
    _check_mask_token(config, folder, tokenizer)
    return ServedModel(
        id=name or folder.resolve().name,
        context_length=_context_length(config, folder),
        vocab_size=_positive(config, folder, "embedding_size", "vocab_size"),
        eos_ids=_eos_ids(config, generation, tokenizer),
        default_output=int(generation.get("max_new_tokens") or DEFAULT_OUTPUT),
        tokenizer=tokenizer,
        template=load_template(folder),
        doubts=_mask_doubts(config, folder, tokenizer),
    )


def _check_mask_token(config: dict[str, Any], folder: Path, tokenizer: ModelTokenizer) -> None:
    mask_id = config.get("mask_token_id")
    if isinstance(mask_id, int) and not tokenizer.knows(mask_id):
        raise ModelFolderError(
            f"the tokenizer of {folder} has no mask token: config.json gives it the id {mask_id}, "
            "which no token has; fetch the tokenizer's files of the same model again"
        )


def _mask_doubts(
    config: dict[str, Any], folder: Path, tokenizer: ModelTokenizer
) -> tuple[str, ...]:
    """A mask is a special token, where the tokenizer says which ones are."""
    mask_id = config.get("mask_token_id")
    special_ids = tokenizer.special_ids
    if not isinstance(mask_id, int) or not special_ids or mask_id in special_ids:
        return ()
    text = tokenizer.token_text(mask_id)
    return (
        f"{folder}/config.json has mask_token_id {mask_id}, which is {text!r} in the tokenizer and "
        "none of its special tokens; if that is a token of texts, answers "
        "will make no sense: copy the published mask_token_id",
    )


def _context_length(config: dict[str, Any], folder: Path) -> int:
    length = _positive(config, folder, "max_sequence_length", "max_position_embeddings")
    return min(length, _USABLE_CONTEXT.get(config.get("model_type", ""), length))


def _positive(config: dict[str, Any], folder: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelFolderError(
        f"{folder}/config.json has no positive {' or '.join(names)}; "
        "use a folder of LLaDA's or Dream's kind"
    )


def _eos_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: ModelTokenizer
) -> frozenset[int]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value] if value is not None else [])
    turn_ends = (tokenizer.token_id(token) for token in _END_OF_TURN)
    return frozenset(ids) | {end for end in turn_ends if end in tokenizer.special_ids}
