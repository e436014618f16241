"""The HTTP listener: a socket that is bound before anything else starts, and uvicorn on it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from dilaserve.errors import SettingsError

BACKLOG = 2048
KEEP_ALIVE_S = 65
"""Longer than clients keep idle connections, or they would send into one that is being closed."""


class HttpServer(uvicorn.Server):
    """Serves an application. Leaves signals alone: uvicorn itself would raise them again at its
    end, and so exit by them."""

    def __init__(self, app: ASGIApp, *, stop_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(stop_timeout_s)),
            )
        )

    def stop(self) -> None:
        """End `serve` after the open connections have ended, or their time is up."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises SettingsError where the address cannot
    be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingsError(
            f"DILASERVE_HOST={host!r} with DILASERVE_PORT={port} cannot be listened on: {error}; "
            "use for example 127.0.0.1 and 0 (a free port)"
        ) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
