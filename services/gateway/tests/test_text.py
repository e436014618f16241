"""Text that is given out never changes, whatever the tokenizer and the chunks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dilaserve_gateway.text import Detokenizer, StopFinder
from dilaserve_gateway.tokenizer import ModelTokenizer

CORPUS = ["The quick brown fox, naïve café", "東京 and 😀 emoji", "hello world 12 345 don't"] * 3
TEXTS = st.text(alphabet=st.sampled_from(" abcdefgé東京😀👩‍👧'-.\n1"), max_size=40)


def byte_level() -> Tokenizer:
    """As LLaDA's, Dream's and GPT-2's: pairs of bytes, so tokens end within characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama-2's: words marked by ▁, unknown characters as tokens of one byte."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def word_pieces() -> Tokenizer:
    """As BERT's: the decoder puts the spaces."""
    vocab = {name: i for i, name in enumerate(["[UNK]", "a", "b", "##a", "##b", "ab", "##ab"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def characters() -> Tokenizer:
    """As the tiny model's."""
    vocab = {char: i for i, char in enumerate("ab é😀\n")}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZERS = {
    "byte_level": ModelTokenizer(byte_level()),
    "byte_fallback": ModelTokenizer(byte_fallback()),
    "word_pieces": ModelTokenizer(word_pieces()),
    "characters": ModelTokenizer(characters()),
}


def detokenize(tokenizer: ModelTokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(text=TEXTS)
def test_pieces_join_to_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenize(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "word_pieces", "characters"])
@settings(deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_their_decoding(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    n = {"byte_level": 300, "word_pieces": 7, "characters": 6}[name]
    ids = data.draw(st.lists(st.integers(0, n - 1), max_size=30))
    assert "".join(detokenize(tokenizer, ids)) == tokenizer.decode(ids)


def test_characters_are_given_out_whole() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 3  # ▁ and two bytes
    assert detokenize(tokenizer, ids) == ["", "", "é", ""]


def test_broken_characters_come_with_the_flush() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first_of_two = tokenizer.encode("é", add_special_tokens=False)
    lead = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xc3")
    assert detokenize(tokenizer, [lead]) == ["", "\ufffd"]
    assert detokenize(tokenizer, first_of_two)[-2] == "é"


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_stops_do_not_depend_on_chunks(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder = StopFinder(stops)
    pieces = [finder.push(text[a:b]) for a, b in itertools.pairwise(bounds)]
    found, kept = cut_at_first_stop(text, stops)
    assert finder.found is found
    assert "".join(pieces) + finder.flush() == kept


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[bool, str]:
    """Grows the text by a character at a time, as the simplest definition would."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return True, text[: end - max(map(len, ending))]
    return False, text


def test_a_possible_stop_is_held_back() -> None:
    finder = StopFinder(["\n\n"])
    assert finder.push("line\n") == "line"
    assert finder.push("next\n") == "\nnext"
    assert finder.push("\nmore") == ""
    assert finder.found
    assert finder.push("never") == ""
