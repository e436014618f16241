"""`dilaserve tokenize`: prompts in text → token ids, as the gateway would make them of a message.

For `dilaserve record`, since the engine knows no tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dilaserve.errors import InvalidRequestError
from dilaserve.model_folder import find_model
from dilaserve_gateway.model import ServedModel, load_model

__all__ = ["tokenize"]


def tokenize(
    prompts: Annotated[Path, typer.Argument(help="JSON lines that hold a prompt each.")],
    out: Annotated[Path, typer.Option(help="File of JSON lines with prompt_ids.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder; default: DILASERVE_MODEL, or the bundled one."),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field of the text; the first text, where it is a list.")
    ] = "prompt",
    no_template: Annotated[
        bool, typer.Option("--no-template", help="Take the text as it is, not as a user's message.")
    ] = False,
) -> None:
    """Turn prompts into token ids for `dilaserve record`."""
    served = load_model(model or find_model(None, os.environ))
    lines = [
        msgspec.json.encode({"prompt_ids": _ids(served, text, no_template)})
        for text in _texts(prompts, field)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"".join(line + b"\n" for line in lines))
    typer.echo(f"{out} has {len(lines)} prompts")


def _texts(path: Path, field: str) -> Iterator[str]:
    """Raises InvalidRequestError, naming the line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"prompts {path} cannot be read: {error.strerror}; give a file of JSON lines"
        ) from error
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            yield _text(path, number, line, field)


def _text(path: Path, number: int, line: bytes, field: str) -> str:
    try:
        given = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"prompts {path}, line {number}: {error}; mend it") from error
    text = given.get(field)
    if isinstance(text, list) and text:
        text = text[0]
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"prompts {path}, line {number} has no text in {field!r}, but the fields "
            f"{sorted(given)}; name one of them by --field"
        )
    return text


def _ids(served: ServedModel, text: str, no_template: bool) -> list[int]:
    if no_template or served.template is None:
        return served.tokenizer.encode(text, add_special_tokens=True)
    rendered = served.template.render([{"role": "user", "content": text}])
    return served.tokenizer.encode(rendered, add_special_tokens=False)
