"""Chat templates render as transformers renders them, and fail as the client's or our fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilaserve.errors import InvalidRequestError, ModelFolderError
from dilaserve_gateway.template import load_template

TINY = Path(__file__).parents[3] / "models" / "tiny"

LLADA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
LOOPING = (
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": " add 12+34 "},
]


def folder_with(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def rendered(folder: Path, messages: list[dict[str, str]]) -> str:
    template = load_template(folder)
    assert template is not None
    return template.render(messages)


@pytest.mark.parametrize("source", [LLADA, CHATML, LOOPING])
def test_renders_as_transformers(tmp_path: Path, source: str) -> None:
    from transformers import PreTrainedTokenizerFast

    bos = {"__type": "AddedToken", "content": "<bos>"}
    folder = folder_with(tmp_path, {"chat_template": source, "bos_token": bos})
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert rendered(folder, MESSAGES) == expected


def test_tiny_renders_as_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(TINY)
    for text in ("Running total of 3 5 2 7", "add 12 + 34", "who are you?", "colour ab?d"):
        messages = [{"role": "user", "content": text}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered(TINY, messages) == expected


def test_a_file_goes_before_the_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"chat_template": "config"})
    assert rendered(folder, MESSAGES) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(folder, MESSAGES) == "file"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert rendered(folder_with(tmp_path, {"chat_template": several}), MESSAGES) == "b"


def test_no_template(tmp_path: Path) -> None:
    assert load_template(folder_with(tmp_path, {})) is None


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"chat_template": STRICT})
    with pytest.raises(InvalidRequestError, match="begin with user") as caught:
        rendered(folder, MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_is_in_a_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    folder = folder_with(tmp_path, {"chat_template": escape})
    with pytest.raises(InvalidRequestError, match="unsafe"):
        rendered(folder, MESSAGES)


def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"chat_template": "{% if %}"})
    with pytest.raises(ModelFolderError, match=r"does not compile \(line 1\)"):
        load_template(folder)
