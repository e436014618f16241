"""Forwards the log lines of the children to stderr, each with the name of its process."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

NAME_WIDTH = 10
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class LineForwarder:
    """Writes `name │ line`; coloured on a terminal. Falls silent when nobody reads any more."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._coloured = self._stream.isatty()
        self._colours: dict[str, int] = {}
        self._broken = False

    def write(self, name: str, line: str) -> None:
        """Write one line."""
        if self._broken:
            return
        try:
            self._stream.write(f"{self._prefix(name)} {line}\n")
            self._stream.flush()
        except OSError:
            self._broken = True  # the children must go on, whoever reads

    def handler(self) -> logging.Handler:
        """A logging handler that writes the supervisor's own records."""
        return _Handler(self)

    def _prefix(self, name: str) -> str:
        text = f"{name:<{NAME_WIDTH}} │"
        if not self._coloured:
            return text
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        return f"\x1b[{colour}m{text}\x1b[0m"


class _Handler(logging.Handler):
    def __init__(self, forwarder: LineForwarder) -> None:
        super().__init__()
        self._forwarder = forwarder

    def emit(self, record: logging.LogRecord) -> None:
        self._forwarder.write("supervisor", self.format(record))
