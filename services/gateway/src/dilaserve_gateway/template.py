"""A model's chat template: messages → prompt text, rendered in Jinja's sandbox.

Knows no tokenizer; the template comes from the model folder, the messages from a client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dilaserve.errors import InvalidRequestError, ModelFolderError
from dilaserve_gateway.tokenizer import read_json

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, template: jinja2.Template, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to where the assistant begins to speak. Raises InvalidRequestError for
        messages that the template refuses."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}; "
                "use the roles system, user and assistant in the order that the model knows",
                param="messages",
            ) from error


def load_template(folder: Path) -> ChatTemplate | None:
    """The template in chat_template.jinja, else in tokenizer_config.json; None without one.
    Raises ModelFolderError for one that does not compile."""
    config = read_json(folder / "tokenizer_config.json", missing_ok=True)
    source = _source(folder, config)
    if source is None:
        return None
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFolderError(
            f"the chat template of {folder} does not compile (line {error.lineno}): {error}; "
            "fetch it again"
        ) from error
    return ChatTemplate(template, _special_tokens(config))


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Their text; published folders give a string or an object with `content`."""
    tokens = {name: config.get(name) for name in _TOKEN_NAMES}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _environment() -> jinja2.Environment:
    """The environment that published templates are written for (transformers' conventions)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
