"""A small HTTP listener for services without a web server: /metrics and /healthz, on a thread."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dilaserve.errors import SettingsError

POLL_S = 0.1
"""How soon `close` is noticed."""

FOREIGN = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""How the system says that an address is not this machine's, or not of a kind it can be."""

Render = Callable[[], tuple[bytes, str]]


class MetricsListener:
    """Serves from a daemon thread until closed. Port 0 takes a free one.

    Raises SettingsError when the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, render: Render) -> None:
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(render))
        except (OSError, OverflowError, UnicodeError) as error:
            raise _unusable(host, port, error) from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _unusable(host: str, port: int, error: Exception) -> SettingsError:
    """A host is at fault that is no name or address, or none of this machine."""
    if isinstance(error, socket.gaierror | UnicodeError) or (
        isinstance(error, OSError) and error.errno in FOREIGN
    ):
        return SettingsError(
            f"DILASERVE_METRICS_HOST={host!r}: cannot listen there: {error}; "
            "use 127.0.0.1, another address of this machine, or 0.0.0.0 for all"
        )
    return SettingsError(
        f"DILASERVE_METRICS_PORT={port}: cannot listen on {host!r}: {error}; "
        "use a free port, or 0 to have one chosen"
    )


def _handler(render: Render) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET; anything else is 501 by the base class."""

        timeout = 10.0

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, *render())
                case "/healthz":
                    self._answer(200, b"ok\n", "text/plain; charset=utf-8")
                case _:
                    self._answer(404, b"try /metrics or /healthz\n", "text/plain; charset=utf-8")

        def _answer(self, code: int, body: bytes, content_type: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """A scrape is not worth a line."""

    return Handler
