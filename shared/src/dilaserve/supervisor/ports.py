"""Ports for listeners of the embedded stack.

A free port is held by a lock file from its choice on: the process that is to listen there starts
seconds later, and supervisors that start in the same moment must not choose the same one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dilaserve.embedded import free_port
from dilaserve.errors import DiLaServeError

N_TRIED = 100
HIGHEST = 2**16 - 1


def is_free(host: str, port: int) -> bool:
    """Whether a listener could be opened there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


@contextmanager
def held_port(host: str, port: int | None, *, first: int) -> Iterator[int]:
    """`port`, any free one for 0, or the first free one from `first` on; no other supervisor on
    this machine gets it for as long as the context lasts. Raises DiLaServeError when it is taken,
    when all are, and for what is no port."""
    for candidate in _candidates(host, port, first):
        lock = _try_to_hold(candidate)
        if lock is None:
            continue
        try:
            if is_free(host, candidate):
                yield candidate
                return
        finally:
            os.close(lock)
    raise _none_free(host, port, first)


def _candidates(host: str, port: int | None, first: int) -> Iterable[int]:
    if port is None:
        return range(first, first + N_TRIED)
    if not 0 <= port <= HIGHEST:
        raise DiLaServeError(
            f"--port {port} is no port from 0 to {HIGHEST}; give another one, or none to take the "
            "next free one"
        )
    return [port] if port else (_any_free(host) for _ in range(N_TRIED))


def _any_free(host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        raise DiLaServeError(
            f"no port can be had on {host}: {error.strerror}; give an address of this machine "
            "by --host"
        ) from error


def _try_to_hold(port: int) -> int | None:
    """The descriptor of the port's lock file, locked; None when another supervisor has it."""
    path = Path(tempfile.gettempdir()) / f"dilaserve-port-{port}.lock"
    try:
        lock = _open_lock(path)
    except OSError as error:
        raise DiLaServeError(
            f"the lock file {path} cannot be used: {error.strerror}; "
            "remove it, or set TMPDIR to a folder that can be written to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _open_lock(path: Path) -> int:
    """Of any user: in a shared folder the kernel refuses to create what another user's is."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o644)


def _none_free(host: str, port: int | None, first: int) -> DiLaServeError:
    if port == 0:
        return DiLaServeError(f"no free port on {host}; give one by --port")
    if port is not None:
        return DiLaServeError(
            f"port {port} on {host} is taken; give another one by --port, "
            "or none to take the next free one"
        )
    last = first + N_TRIED - 1
    return DiLaServeError(f"no free port on {host} from {first} to {last}; give one by --port")
