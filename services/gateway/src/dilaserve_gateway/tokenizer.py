"""A model folder's tokenizer, without remote code, transformers or torch.

Reads `tokenizer.json`, or builds one of `vocab.json` and `merges.txt` as Dream's and Qwen2's
folders hold them. Knows no chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dilaserve.errors import ModelFolderError
from dilaserve.model_folder import LFS_REMEDY, is_lfs_pointer

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts text into words before its byte pairs are merged."""


class ModelTokenizer:
    """Text ↔ ids. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_of_char = _byte_alphabet() if _is_byte_level(tokenizer) else {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; with the special tokens that the tokenizer puts around a sequence."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens skipped; broken characters as U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def knows(self, token_id: int) -> bool:
        """Whether a token has this id."""
        return self._tokenizer.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones by name; parts of characters as U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, even if they are no whole character."""
        name = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self.special_ids and self._byte_of_char:
            known = [self._byte_of_char.get(char) for char in name]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return self.token_text(token_id).encode()


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model folder. Raises ModelFolderError, naming file and remedy."""
    config = read_json(folder / "tokenizer_config.json", missing_ok=True)
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        tokenizer = _read(whole)
    elif vocab.is_file() and merges.is_file():
        tokenizer = _build_byte_pairs(vocab, merges)
    else:
        raise ModelFolderError(
            f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt; "
            "copy the tokenizer files of the published model there"
        )
    _add_missing(tokenizer, folder, config)
    return ModelTokenizer(tokenizer)


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFolderError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelFolderError(
            f"{path} does not exist; set DILASERVE_MODEL to a folder in the Hugging Face layout"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object; fetch it again")
    return value


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        remedy = LFS_REMEDY if is_lfs_pointer(path) else "fetch it again"
        raise ModelFolderError(f"{path} is no tokenizer: {error}; {remedy}") from error


def _build_byte_pairs(vocab: Path, merges: Path) -> Tokenizer:
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:
        raise ModelFolderError(
            f"{vocab} and {merges.name} make no tokenizer: {error}; fetch them again"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_missing(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json names beyond the vocabulary, in order of id."""
    for token_id, token in _named(folder, config):
        if tokenizer.get_added_tokens_decoder().get(token_id) is not None:
            continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ModelFolderError(
                f"{folder}/tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"the vocabulary {tokenizer.token_to_id(token.content)}; fetch both again"
            )


def _named(folder: Path, config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    try:
        rows = config.get("added_tokens_decoder", {}).items()
        return [(token_id, _token(row)) for token_id, row in sorted((int(i), r) for i, r in rows)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"{folder}/tokenizer_config.json lists its added tokens in a form that is not known "
            f"({type(error).__name__}: {error}); fetch it again"
        ) from error


def _token(row: dict[str, Any]) -> AddedToken:
    return AddedToken(
        row["content"],
        single_word=row.get("single_word", False),
        lstrip=row.get("lstrip", False),
        rstrip=row.get("rstrip", False),
        normalized=row.get("normalized", False),
        special=row.get("special", False),
    )


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    return "ByteLevel" in kinds


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level vocabularies spell bytes: printable Latin-1 as it is, the
    others as the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
