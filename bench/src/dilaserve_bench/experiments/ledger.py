"""Keeps every measured point as soon as it is there, so that an experiment goes on where it was
interrupted. Points measured by other code than the present are never found."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from dilaserve.errors import DiLaServeError

__all__ = ["Ledger", "code_fingerprint"]

T = TypeVar("T")
K = TypeVar("K")
MEASURED_CODE = (
    "dilaserve",
    "dilaserve_bench",
    "dilaserve_gpu_worker",
    "dilaserve_predictor",
    "dilaserve_reconfigurator",
    "dilaserve_scheduler",
)
N_HEX = 12


class _Entry(msgspec.Struct, frozen=True):
    key: msgspec.Raw
    value: msgspec.Raw


class Ledger:
    """One line for each point. `is_fresh`: what earlier sessions kept is passed over. Raises
    DiLaServeError where nothing could be kept: before anything is measured, if it shows then."""

    def __init__(self, path: Path, *, is_fresh: bool = False) -> None:
        self._path = path
        self._points: dict[bytes, msgspec.Raw] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, b"")
            if not is_fresh:
                self._points = dict(_read(path))
        except OSError as error:
            raise self._unusable(error) from error

    def find(self, key: object, kind: type[T]) -> T | None:
        """What was kept under this key and type. What is not of that type any more is not found:
        it was written by hand, or damaged."""
        value = self._points.get(_name(key, kind))
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=kind)
        except msgspec.DecodeError:
            return None

    def missing(self, keys: Iterable[K], kind: type) -> list[K]:
        """Those under which nothing of this type was kept, each once."""
        named = {_name(key, kind): key for key in keys}
        return [key for key in named.values() if self.find(key, kind) is None]

    def keep(self, key: object, value: object) -> None:
        """Written at once, in one piece, so that two sessions can share the file."""
        name = _name(key, type(value))
        self._points[name] = msgspec.Raw(msgspec.json.encode(value))
        line = msgspec.json.encode(_Entry(msgspec.Raw(name), self._points[name])) + b"\n"
        try:
            _append(self._path, line)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> DiLaServeError:
        return DiLaServeError(
            f"points cannot be kept in {self._path}: {error.strerror}; make room, or set "
            "DILASERVE_HOME to another folder"
        )


def code_fingerprint(packages: Iterable[str] = MEASURED_CODE) -> str:
    """Of the sources and data of these packages, as far as they are installed."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in {".py", ".json"}):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:N_HEX]


def _append(path: Path, line: bytes) -> None:
    """In one piece, on a line of its own even behind one that was cut off. Raises OSError."""
    with path.open("a+b", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        if line and file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(path: Path) -> Iterable[tuple[bytes, msgspec.Raw]]:
    """All whole lines: one that was cut off by a crash is passed over."""
    for line in path.read_bytes().splitlines():
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.DecodeError, RecursionError):
            continue
        yield bytes(entry.key), entry.value.copy()


def _name(key: object, kind: type) -> bytes:
    return msgspec.json.encode({"kind": kind.__name__, "of": key}, order="sorted")
