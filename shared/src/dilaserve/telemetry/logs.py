"""Logging to stderr, one line a record: time, level, service id, message, trace id in a span."""

from __future__ import annotations

import logging
import sys
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
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(LEVELS[level.lower()])
    return handler


def remove(handler: LineHandler) -> None:
    """Take the handler off the root logger."""
    logging.getLogger().removeHandler(handler)
    handler.flush()
