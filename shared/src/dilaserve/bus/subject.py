"""NATS subjects: what is well formed, and which pattern matches which subject."""

from __future__ import annotations

import re
from functools import lru_cache

MAX_PAYLOAD = 2**20
"""Bytes in one message: the NATS server's default limit."""

_SPACE = re.compile(r"\s")


@lru_cache(maxsize=1024)  # a service publishes on a few, over and over
def check_subject(subject: str, *, pattern: bool = False) -> None:
    """Raise ValueError unless `subject` is dot-separated, non-empty tokens without white space;
    a `pattern` may hold `*` as a token and `>` as the last one, a subject may not."""
    tokens = subject.split(".")
    if not _SPACE.search(subject) and all(tokens):
        wild = [i for i, token in enumerate(tokens) if "*" in token or ">" in token]
        if not wild or (pattern and all(_is_wildcard(tokens, i) for i in wild)):
            return
    kind = "pattern" if pattern else "subject"
    raise ValueError(f"{subject!r} is not a {kind}; use tokens separated by dots, like dlm.v1.x")


def check_size(subject: str, data: bytes, limit: int = MAX_PAYLOAD) -> None:
    """Raise ValueError when a message is larger than the server takes."""
    if len(data) > limit:
        raise ValueError(
            f"a message of {len(data)} bytes on {subject} is above the limit of {limit}; "
            "split it, or raise max_payload in nats.conf"
        )


def matches(pattern: list[str], subject: list[str]) -> bool:
    """Whether the tokens of a pattern match those of a subject (`*` one token, `>` the rest)."""
    if pattern[-1] == ">":
        return len(subject) >= len(pattern) and matches_each(pattern[:-1], subject)
    return len(subject) == len(pattern) and matches_each(pattern, subject)


def matches_each(pattern: list[str], subject: list[str]) -> bool:
    """Whether each token of `pattern` is `*` or equals the subject's token at its place."""
    return all(p in ("*", s) for p, s in zip(pattern, subject, strict=False))


def _is_wildcard(tokens: list[str], index: int) -> bool:
    return tokens[index] == "*" or (tokens[index] == ">" and index == len(tokens) - 1)
