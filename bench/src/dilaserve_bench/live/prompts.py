"""What virtual clients ask: prompts of a file, or sums, which every model has an answer to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from dilaserve.errors import DiLaServeError

__all__ = ["PromptsError", "read_messages", "sums"]

Messages = list[dict[str, Any]]


class PromptsError(DiLaServeError):
    """A file of prompts that cannot be read."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Any one of these."""

    messages: Messages | None = None
    prompt: str | None = None
    question: str | None = None
    turns: list[str] = []


def sums(n: int, seed: int) -> list[Messages]:
    """`n` additions of seven digits."""
    rng = random.Random(f"{seed}/sums")
    pairs = [(rng.randrange(10**6, 10**7), rng.randrange(10**6, 10**7)) for _ in range(n)]
    return [_asked(f"Add {a} and {b}") for a, b in pairs]


def read_messages(path: Path) -> list[Messages]:
    """Of JSON lines with `messages`, `prompt`, `question` or `turns`, whose first one is asked.
    Raises PromptsError, naming the line."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise PromptsError(
            f"prompts {path} cannot be read: {error.strerror}; give a file of JSON lines"
        ) from error
    if not lines:
        raise PromptsError(f"prompts {path} is empty; give a file of JSON lines")
    return [_messages_of(path, number, line) for number, line in enumerate(lines, 1)]


def _messages_of(path: Path, number: int, line: bytes) -> Messages:
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise PromptsError(f"prompts {path}, line {number}: {error}") from error
    text = read.prompt or read.question or next(iter(read.turns), None)
    if not read.messages and not text:
        raise PromptsError(
            f"prompts {path}, line {number} has none of messages, prompt, question and turns; "
            'use for example {"prompt": "Add 1 and 2"}'
        )
    return read.messages or _asked(text or "")


def _asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]
