"""Tokenizers read as the library that publishes them reads them, without it and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dilaserve.errors import ModelFolderError
from dilaserve_gateway.tokenizer import load_tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny"
SPECIAL = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool>": False}


@pytest.fixture(scope="module")
def dream_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Dream's: vocab.json, merges.txt, and special tokens in tokenizer_config.json."""
    folder = tmp_path_factory.mktemp("dream")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world, don't 12 345\n\n naïve 東京"] * 5, trainer)
    tokenizer.model.save(str(folder))
    added = {
        str(tokenizer.get_vocab_size() + i): {"content": content, "special": special}
        for i, (content, special) in enumerate(SPECIAL.items())
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


@pytest.fixture(scope="module")
def qwen2(dream_folder: Path) -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(dream_folder)


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, pathlib, dilaserve_gateway.__main__ as m\n"
        f"m.load_model(pathlib.Path({str(TINY)!r}))\n"
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.parametrize("special", [False, True])
def test_tiny_reads_as_in_transformers(special: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(TINY)
    ours = load_tokenizer(TINY)
    for text in ("Running total of 3 5 2", "<bos>hi <sep>", "naïve 😀\n", ""):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_ids >= set(theirs.all_special_ids)


@settings(deadline=None)
@given(text=st.text(alphabet=" abhelowrd'tDON12\n\r\t,.é東<|im_end|>", max_size=40))
def test_vocab_and_merges_read_as_qwen2(qwen2: Any, dream_folder: Path, text: str) -> None:
    ours = load_tokenizer(dream_folder)
    ids = qwen2(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=True) == ids
    assert ours.decode(ids) == qwen2.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_special_tokens_come_from_the_config(dream_folder: Path) -> None:
    tokenizer = load_tokenizer(dream_folder)
    ids = {content: tokenizer.token_id(content) for content in SPECIAL}
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False)[-1] == ids["<|im_end|>"]
    assert tokenizer.special_ids == {ids[c] for c, special in SPECIAL.items() if special}
    assert tokenizer.token_text(ids["<|im_end|>"] or 0) == "<|im_end|>"


@settings(deadline=None)
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text))
def test_bytes_of_tokens_join_to_the_text(dream_folder: Path, text: str) -> None:
    import unicodedata

    tokenizer = load_tokenizer(dream_folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined.decode() == unicodedata.normalize("NFC", text)


def test_bytes_of_other_tokens() -> None:
    tiny = load_tokenizer(TINY)
    assert [tiny.token_bytes(i) for i in tiny.encode("a b", add_special_tokens=False)] == [
        b"a",
        b" ",
        b"b",
    ]
    assert tiny.token_bytes(tiny.token_id("<eos>") or 0) == b"<eos>"
    assert tiny.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer.*copy the tokenizer files"),
        ({"vocab.json": "{}"}, "holds no tokenizer"),
        ({"tokenizer.json": "{}"}, "is no tokenizer.*fetch it again"),
        ({"tokenizer.json": "\xff"}, "is no tokenizer"),
        ({"vocab.json": "{}", "merges.txt": "a b"}, "make no tokenizer"),
        ({"tokenizer_config.json": "["}, "cannot be read"),
        ({"tokenizer_config.json": "[]"}, "no JSON object"),
    ],
)
def test_a_broken_folder_says_what_to_do(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ModelFolderError, match=message):
        load_tokenizer(tmp_path)


def test_ids_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    config = {"added_tokens_decoder": {"5000": {"content": "<extra>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="gives '<extra>' the id 5000, the vocabulary"):
        load_tokenizer(tmp_path)
