from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dilaserve.errors import InvalidRequestError
from dilaserve_gateway.model import load_model
from dilaserve_gateway.tokenize_command import tokenize

TINY = Path(__file__).parents[3] / "models" / "tiny"


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(tokenize)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(tmp_path: Path, text: str, *options: object) -> list[dict[str, object]]:
    (tmp_path / "in.jsonl").write_text(text)
    out = tmp_path / "new" / "ids.jsonl"
    result = invoke(tmp_path / "in.jsonl", "--model", TINY, "--out", out, *options)
    if result.exception is not None:
        raise result.exception
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_prompt_is_tokenized_as_a_users_message(tmp_path: Path) -> None:
    lines = written(tmp_path, '{"prompt": "Echo abc"}\n\n{"prompt": "b", "id": 3}\n')
    served = load_model(TINY)
    assert served.template is not None
    rendered = served.template.render([{"role": "user", "content": "Echo abc"}])
    assert lines[0] == {"prompt_ids": served.tokenizer.encode(rendered, add_special_tokens=False)}
    assert len(lines) == 2


def test_the_model_is_found_as_by_the_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Echo abc"}\n')
    monkeypatch.setenv("DILASERVE_MODEL", str(TINY))
    result = invoke(tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert "has 1 prompts" in result.output


def test_the_field_can_be_named_and_the_template_left_out(tmp_path: Path) -> None:
    text = '{"turns": ["first", "second"]}\n'
    [line] = written(tmp_path, text, "--field", "turns", "--no-template")
    expected = load_model(TINY).tokenizer.encode("first", add_special_tokens=True)
    assert line["prompt_ids"] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "why"}\n', r"line 1 has no text in 'prompt', but the fields \['question'\]"),
        ('{"prompt": "a"}\nnonsense\n', "line 2: JSON is malformed"),
        ('{"prompt": []}\n', "no text in 'prompt'"),
    ],
)
def test_what_is_no_prompt_is_told(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        written(tmp_path, text)
