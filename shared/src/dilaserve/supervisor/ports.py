"""Ports for listeners of the embedded stack."""

from __future__ import annotations

import socket

from dilaserve.errors import DiLaServeError

N_TRIED = 100


def is_free(host: str, port: int) -> bool:
    """Whether a listener could be opened there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


def exactly(host: str, port: int) -> int:
    """`port`, if it is free. Raises DiLaServeError otherwise."""
    if is_free(host, port):
        return port
    raise DiLaServeError(
        f"port {port} on {host} is taken; give another one by --port, "
        "or none to take the next free one"
    )


def next_free(host: str, port: int) -> int:
    """The first free port from `port` on."""
    for candidate in range(port, port + N_TRIED):
        if is_free(host, candidate):
            return candidate
    raise DiLaServeError(
        f"no free port on {host} from {port} to {port + N_TRIED - 1}; give one by --port"
    )
