"""Commands as Redis wants them on the wire (RESP): a batch of commits is one piece of bytes.

redis-py packs field by field, at several times the cost. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from dilaserve.store.encoding import Field

__all__ = ["pack"]


_COMING_AGAIN = frozenset((str, int))
"""Types of fields that are mostly keys, names and small numbers, the same with every pass."""


def pack(commands: Iterable[Sequence[Field]]) -> bytes:
    """All commands, one behind the other; numbers as Python writes them."""
    pieces: list[bytes] = []
    for command in commands:
        pieces.append(b"*%d\r\n" % len(command))
        pieces += [
            _remembered(field) if type(field) in _COMING_AGAIN else _frame(field)
            for field in command
        ]
    return b"".join(pieces)


def _frame(field: Field) -> bytes:
    if not isinstance(field, bytes):
        field = (field if isinstance(field, str) else repr(field)).encode()
    return b"$%d\r\n%b\r\n" % (len(field), field)


_remembered = lru_cache(maxsize=8192)(_frame)
