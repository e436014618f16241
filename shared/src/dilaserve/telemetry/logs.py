"""Logging to stderr, one line a record: time, level, service id, message, trace id in a span."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from opentelemetry import trace

from dilaserve.errors import SettingsError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
QUIET_S = 60.0
"""The exporter of spans says the same of a collector that is down only once in this time."""


WINDOW_S = 10.0
BURST = 20
"""Lines of one kind written within WINDOW_S; more would only fill the disk."""
LEFT_OUT = "n_left_out"
N_KINDS = 1024
"""Kinds of lines remembered."""


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO gateway-1a2b text trace=…`; line breaks become `\\n`."""

    def __init__(self, service_id: str) -> None:
        super().__init__()
        self._service_id = service_id

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, a traceback included."""
        text = record.getMessage()
        if n_left_out := getattr(record, LEFT_OUT, 0):
            text += f" ({n_left_out} more like this were left out before)"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        head = f"{at}.{int(record.msecs):03d}Z {record.levelname} {self._service_id}"
        line = f"{head} {text}".replace("\n", "\\n")
        context = trace.get_current_span().get_span_context()
        return f"{line} trace={context.trace_id:032x}" if context.is_valid else line


class CollectorDown(logging.Filter):
    """Lets each complaint of OpenTelemetry's own loggers pass once a minute; others always."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        if not record.name.startswith("opentelemetry."):
            return True
        key = f"{record.name}:{record.msg}"
        fresh = record.created - self._last_s.get(key, -QUIET_S) >= QUIET_S
        if fresh:
            self._last_s[key] = record.created
        return fresh


class Bursts(logging.Filter):
    """Lets so many lines of one kind pass at a time, and has the next one say how many it did
    not. A kind is a message before its values are filled in. Debug lines always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple[str, object], _Burst] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        if record.levelno <= logging.DEBUG:
            return True
        kind = (record.name, record.msg)
        burst = self._seen.get(kind)
        if burst is None or record.created - burst.began_s >= WINDOW_S:
            setattr(record, LEFT_OUT, max(0, burst.n - BURST) if burst else 0)
            self._seen[kind] = burst = _Burst(record.created)
            self._seen.move_to_end(kind)
            if len(self._seen) > N_KINDS:
                self._seen.popitem(last=False)
        burst.n += 1
        return burst.n <= BURST


@dataclass(slots=True)
class _Burst:
    began_s: float
    n: int = 0


def install(level: str, service_id: str, stream: TextIO | None = None) -> LineHandler:
    """Make the root logger write to `stream` (default stderr). Raises SettingsError for a level
    that there is not. Undone by `remove`."""
    if level.lower() not in LEVELS:
        raise SettingsError(
            f"DILASERVE_LOG_LEVEL={level!r} is none of {', '.join(LEVELS)}; use for example info"
        )
    handler = LineHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(service_id))
    handler.addFilter(CollectorDown())
    handler.addFilter(Bursts())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(LEVELS[level.lower()])
    return handler


def remove(handler: LineHandler) -> None:
    """Take the handler off the root logger."""
    logging.getLogger().removeHandler(handler)
    handler.flush()
