"""Frames of the pipes between processes of one instance: length, then MessagePack.

An end of the pipe where a frame should begin means that the other side has ended.
"""

from __future__ import annotations

import struct
from typing import IO

import msgspec

__all__ = ["LENGTH", "frame", "read_frame", "write_frame"]

LENGTH = struct.Struct("<I")


def frame(value: object) -> bytes:
    """`value` as a frame."""
    data = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(data)) + data


def write_frame(pipe: IO[bytes], value: object) -> None:
    """Send `value`. Raises BrokenPipeError when the other side has ended."""
    pipe.write(frame(value))
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame's MessagePack; None when the other side has ended."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    data = pipe.read(length)
    return data if len(data) == length else None
