"""The bundled tokenizer encodes anything, and its chat template renders the aligned layout."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dilaserve_bench.tiny.layout import (
    CHARACTERS,
    PROMPT_LENGTH,
    UNK,
    VOCAB_SIZE,
    prompt_tokens,
    vocabulary,
)
from dilaserve_bench.tiny.tasks import TASKS, held_out_problem
from dilaserve_bench.tiny.tokenizer import build_tokenizer, tokenizer_config

BUNDLED = Path(__file__).parents[3] / "models" / "tiny"
STARTS = ("", "walk ", "add ", "shift ", "Running total ", "colour ")
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(BUNDLED)


def rendered(*messages: dict[str, Any]) -> list[str]:
    text = TOKENIZER.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == PROMPT_LENGTH
    return TOKENIZER.convert_ids_to_tokens(ids)


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def data_of(tokens: list[str]) -> str:
    return "".join(token for token in tokens[3:-1] if token != "<pad>")


def test_the_bundled_files_are_what_the_code_builds() -> None:
    assert (BUNDLED / "tokenizer.json").read_text() == build_tokenizer().to_str(pretty=True)
    assert TOKENIZER.chat_template == tokenizer_config()["chat_template"]


def test_vocabulary_divides_by_eight_ranks_and_knows_the_special_tokens() -> None:
    assert len(vocabulary()) == len(TOKENIZER) == VOCAB_SIZE
    assert VOCAB_SIZE % 8 == 0
    ids = [TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id]
    ids += [TOKENIZER.mask_token_id, TOKENIZER.unk_token_id]
    assert sorted(ids) == sorted(
        vocabulary()[t] for t in ("<pad>", "<eos>", "<bos>", "<mask>", UNK)
    )


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_has_ids_of_the_vocabulary(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert all(0 <= token < VOCAB_SIZE for token in ids)


@given(st.text(alphabet=[c for c in CHARACTERS if c != "<"], max_size=200))
@settings(deadline=None)
def test_printable_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [32, 64, 96])
def test_readable_prompts_become_the_layout_of_the_training(task: str, length: int) -> None:
    for index in range(20):
        problem = held_out_problem(task, length, 0, index)
        assert rendered(user(problem.prompt)) == prompt_tokens(
            task, problem.parameter, problem.data
        )


@pytest.mark.parametrize(
    ("prompt", "task", "data"),
    [
        ("Please give the running total of 3 5 2 7!", "<total>", "3527"),
        ("walk from 3 4: n E, then from 0 0: S", "<walk>", "34N,E,NE,"),
        ("Walk: N N", "<walk>", "00N,N,"),
        ("What is 12 + 30?", "<add>", "0" * 14 + "12" + "<+0>" * 14 + "<+3><+0>"),
        ("Color: a ? c", "<fill>", "a?c"),
        ("Shift by 4: Hi, you", "<shift>", "hi you"),
        ("Repeat: add 3 and 4", "<echo>", "add 3 and 4"),
        ("Who was Ada Lovelace?", "<echo>", "Who was Ada Lovelace?"),
        ("the running total of nothing", "<echo>", "the running total of nothing"),
        ("", "<echo>", ""),
    ],
)
def test_prompts_as_people_write_them(prompt: str, task: str, data: str) -> None:
    tokens = rendered(user(prompt))
    assert tokens[1] == task
    if prompt.startswith("walk"):
        assert data_of(tokens).startswith("34N,E,")
    else:
        assert data_of(tokens) == data


def test_the_last_user_message_counts() -> None:
    tokens = rendered(
        {"role": "system", "content": "Add 1 and 2"},
        user("Shift by 2: abc"),
        {"role": "assistant", "content": "cde"},
        user("Running total of 1 2"),
        {"role": "assistant", "content": "1"},
    )
    assert (tokens[1], data_of(tokens)) == ("<total>", "12")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "only this"}],
        [user(None)],
        [user([{"type": "text", "text": "Running total"}, {"type": "text", "text": " of 4 4"}])],
        [user([{"type": "image_url", "image_url": {"url": "x"}}])],
    ],
)
def test_unusual_conversations_render(messages: list[dict[str, Any]]) -> None:
    rendered(*messages)


@given(
    st.text(max_size=300),
    st.sampled_from(["", "walk ", "add ", "shift ", "Running total ", "colour "]),
)
@settings(deadline=None)
def test_any_message_fills_exactly_the_layout(text: str, start: str) -> None:
    rendered(user(start + text))


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "<mask>" * 50, "add " + "7 " * 9999, "+" + "9" * 999]
)
def test_long_and_hostile_messages_keep_the_prompt_length(text: str) -> None:
    assert "<mask>" not in rendered(user(text))
