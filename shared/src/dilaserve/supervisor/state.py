"""The stack's state file, by which other commands find a stack, and the lock that says it runs.

`<home>/stack.json` is rewritten at every change; `<home>/stack.lock` is held by the supervisor
for as long as it lives, so a file that a killed supervisor left behind is known to be stale.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.child import ChildPhase

__all__ = [
    "ChildState",
    "StackState",
    "locked",
    "refuse_second",
    "remove_state",
    "running_state",
    "write_state",
]

LOCK_TRIES = 5
LOCK_PAUSE_S = 0.02

StackPhase = Literal["starting", "ready", "stopping"]


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """One child of the supervisor."""

    name: str
    service: str
    phase: ChildPhase
    pid: int | None
    n_restarts: int
    address: str = ""


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """A stack as its supervisor sees it."""

    phase: StackPhase
    supervisor_pid: int
    gateway_url: str
    nats_url: str
    redis_url: str
    model: str
    children: list[ChildState]


_decode = msgspec.json.Decoder(StackState).decode


def write_state(home: Path, state: StackState) -> None:
    """Replace the state file in one step: a reader sees the old one or the new one."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    new = home / "stack.json.new"
    new.write_bytes(text + b"\n")
    new.replace(home / "stack.json")


def remove_state(home: Path) -> None:
    """Remove the state file: the stack has ended."""
    (home / "stack.json").unlink(missing_ok=True)


def running_state(home: Path) -> StackState | None:
    """The state of the stack that runs in `home`; None when none runs."""
    return _read_state(home) if _is_locked(home / "stack.lock") else None


def refuse_second(home: Path) -> None:
    """Raise DiLaServeError when a stack runs in `home`, before anything of its is touched."""
    if _is_locked(home / "stack.lock"):
        raise DiLaServeError(_already_running(home))


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold `home` as its only supervisor. Raises DiLaServeError while another one does, and for
    a folder that cannot be written to."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / "stack.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiLaServeError(
            f"the folder {home} cannot be used: {error.strerror}; "
            "set DILASERVE_HOME to one that can be written to"
        ) from error
    try:
        _take(descriptor, home)
        remove_state(home)  # left behind by a supervisor that was killed
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, home: Path) -> None:
    for _ in range(LOCK_TRIES):  # a reader of the state holds the lock for a moment, too
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    raise DiLaServeError(_already_running(home))


def _read_state(home: Path) -> StackState | None:
    """The state file's content; None where there is none."""
    try:
        return _decode((home / "stack.json").read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.ValidationError as error:
        raise DiLaServeError(
            f"{home / 'stack.json'} was written by another version: {error}; "
            "stop that stack and remove the file"
        ) from error


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _already_running(home: Path) -> str:
    state = _read_state(home)
    where = f" (pid {state.supervisor_pid}, {state.gateway_url})" if state is not None else ""
    return (
        f"a stack already runs in {home}{where}; "
        "end it with `dilaserve down`, or set DILASERVE_HOME to another folder"
    )
