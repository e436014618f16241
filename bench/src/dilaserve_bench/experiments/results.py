"""Results as files, and which code they came from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.twin.checks import check_file

__all__ = ["as_json", "check_target", "commit_of", "write_result"]


class _Kept(msgspec.Struct):
    """What matters of a result that is there already."""

    is_quick: bool
    is_complete: bool


def as_json(document: Document[Any]) -> str:
    """The one document that `--json` prints."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()


def check_target(path: Path, *, is_quick: bool) -> None:
    """Raises DiLaServeError if a result must not be written there."""
    if is_quick and _is_full(path):
        raise DiLaServeError(f"{path} holds a full result; give --quick another --out")
    check_file(path, "--out")


def write_result(document: Document[Any], path: Path) -> bool:
    """False if it was left as it was: what was interrupted never replaces a full result. Replaces
    at once; raises DiLaServeError when it cannot be written."""
    if not document.is_complete and _is_full(path):
        return False
    written = path.with_name(path.name + ".new")
    try:
        written.write_text(as_json(document) + "\n")
        os.replace(written, path)
    except OSError as error:
        raise DiLaServeError(
            f"--out {path} cannot be written: {error.strerror}; run it again with another --out: "
            "what was measured is kept"
        ) from error
    return True


def commit_of(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, `+` behind it if files in `folder` differ
    from it; None where there is no checkout or no git."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes)


def _is_full(path: Path) -> bool:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return kept.is_complete and not kept.is_quick


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
