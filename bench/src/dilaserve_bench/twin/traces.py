"""Reads recorded arrivals: CSV files of Azure and BurstGPT, rates of ServeGen. Draws nothing."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from dilaserve.errors import DiLaServeError

__all__ = ["RateSeries", "TraceEntry", "TraceError", "is_rates", "read_rates", "read_trace"]

_Row = Mapping[str, str]
T = TypeVar("T")
SAME_SLOT = 0.01
"""Relative; times may be rounded."""


class TraceError(DiLaServeError):
    """A trace file that cannot be read, or whose columns are unknown."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One arrival."""

    at_s: float
    n_prompt: int
    n_output: int


@dataclass(frozen=True, slots=True)
class RateSeries:
    """Arrivals a second, constant during each slot."""

    slot_s: float
    rates: tuple[float, ...]


def read_trace(
    path: Path, *, block_length: int, max_sequence_length: int, limit: int | None = None
) -> list[TraceEntry]:
    """Arrivals in order of time, in the file's seconds. As in the paper (Table 3), outputs are
    rounded up to whole blocks and requests that are too long for the model are left out; so are
    those without an answer. Raises TraceError."""
    entries: list[TraceEntry] = []
    for entry in _entries(path):
        n_output = -(-entry.n_output // block_length) * block_length
        if n_output > 0 and entry.n_prompt > 0:
            rounded = TraceEntry(entry.at_s, entry.n_prompt, n_output)
            if rounded.n_prompt + rounded.n_output <= max_sequence_length:
                entries.append(rounded)
    entries.sort(key=lambda entry: entry.at_s)
    if not entries:
        raise TraceError(
            f"trace {path} holds no request of at most {max_sequence_length} tokens; give another "
            "file, or raise --budget"
        )
    return entries[:limit]


def is_rates(path: Path) -> bool:
    """Whether a file holds rates rather than single arrivals. Raises TraceError."""
    first = next(_rows(path), None)
    return first is not None and first.keys() >= {"model", "t_s", "rps"}


def read_rates(path: Path, *, model: str | None = None) -> RateSeries:
    """ServeGen's `model,t_s,rps,...` of one model, by default the first one. Raises TraceError."""
    rows = list(_parsed(path, _rates))
    if not rows:
        raise TraceError(f"rates {path} are empty; give another file")
    name = model or rows[0][0]
    series = [(t_s, rps) for each, t_s, rps in rows if each == name]
    if len(series) < 2:
        raise TraceError(f"rates {path} hold fewer than two slots of {name!r}; give more")
    slot_s = series[1][0] - series[0][0]
    if not 0 < slot_s < math.inf or not any(rps for _, rps in series):
        raise TraceError(
            f"rates {path} of {name!r}: time does not pass, or nobody comes; give slots in order "
            "of time, one of them with a rate above 0"
        )
    for (before_s, _), (t_s, _) in pairwise(series):
        if not math.isclose(t_s - before_s, slot_s, rel_tol=SAME_SLOT):
            raise TraceError(
                f"rates {path} of {name!r}: a slot of {t_s - before_s:g} s behind one of "
                f"{slot_s:g} s; give slots of one length, without gaps"
            )
    return RateSeries(slot_s, tuple(rps for _, rps in series))


def _entries(path: Path) -> Iterator[TraceEntry]:
    first = next(_rows(path), None)
    if first is None:
        raise TraceError(f"trace {path} holds no row under its head; give another file")
    for columns, parse in _FORMATS.items():
        if columns <= first.keys():
            yield from _parsed(path, parse)
            return
    known = "; ".join(", ".join(sorted(columns)) for columns in _FORMATS)
    raise TraceError(f"trace {path} has columns {', '.join(first)}; known are: {known}")


def _parsed(path: Path, parse: Callable[[_Row], T]) -> Iterator[T]:
    for number, row in enumerate(_rows(path), 1):
        try:
            yield parse(row)
        except (TypeError, ValueError) as error:  # a cell that is missing is None
            raise TraceError(
                f"trace {path}, row {number} under its head: {error}; mend or remove that row"
            ) from error


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file)
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror}; give another file"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace {path} is no CSV in UTF-8: {error}; give another file") from error


def _azure(row: _Row) -> TraceEntry:
    at = datetime.fromisoformat(row["TIMESTAMP"])
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return TraceEntry(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(row: _Row) -> TraceEntry:
    return TraceEntry(
        _finite(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
    )


def _rates(row: _Row) -> tuple[str, float, float]:
    rps = _finite(row["rps"])
    if rps < 0:
        raise ValueError(f"{rps} arrivals a second")
    return row["model"], _finite(row["t_s"]), rps


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


_FORMATS: dict[frozenset[str], Callable[[_Row], TraceEntry]] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure,
    frozenset({"Timestamp", "Request tokens", "Response tokens"}): _burstgpt,
}
