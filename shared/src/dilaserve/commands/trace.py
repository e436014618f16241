"""`dilaserve trace`: a collector for one terminal, which prints each request's trace as a tree."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated

import typer
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs

from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.plan import LOOPBACK
from dilaserve.telemetry.trees import TraceTrees

POLL_S = 0.2


def trace(
    port: Annotated[int, typer.Option(help="Port to receive spans on, by OTLP/HTTP.")] = 4318,
    limit: Annotated[int, typer.Option("--count", help="End after this many; 0: never.")] = 0,
) -> None:
    """Receive the spans of a stack, and print the trace of each request as a tree.

    The stack must send them here: start it with DILASERVE_OTLP_ENDPOINT=http://127.0.0.1:4318.
    """
    trees = TraceTrees()
    n_printed = 0
    with _listen(port, trees) as server:
        typer.echo(
            f"Waiting for the spans of a stack that was started with "
            f"DILASERVE_OTLP_ENDPOINT=http://{LOOPBACK}:{server.server_port}",
            err=True,
        )
        while not limit or n_printed < limit:
            server.handle_request()  # one post, or nothing for POLL_S
            for lines in trees.take_complete(time.monotonic()):
                typer.echo("\n".join(lines) + "\n")
                n_printed += 1


def _listen(port: int, trees: TraceTrees) -> HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                trees.add(body, time.monotonic())
            except DecodeError:
                self.send_error(400, "no OTLP spans in protobuf")
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Prints no line for a post."""

    try:
        server = HTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise DiLaServeError(
            f"port {port} on {LOOPBACK} is taken; give another one by --port, and to the stack by "
            "DILASERVE_OTLP_ENDPOINT"
        ) from error
    server.timeout = POLL_S
    return server
