"""An OTLP/HTTP collector for tests: keeps every span that it is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as it arrived; ids in hexadecimal, `parent_id` empty for a root."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    service_id: str
    attributes: dict[str, Value]
    links: frozenset[str]
    """Ids of the spans that it links to."""


class Collector:
    """Listens on `url` until its context ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[CollectedSpan] = []

    def take(self, body: bytes) -> None:
        """Called from the server's threads."""
        self.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))

    def named(self, name: str, *, trace_id: str | None = None) -> list[CollectedSpan]:
        """Spans of this name, of one trace or of all."""
        return [s for s in self.spans if s.name == name and trace_id in (None, s.trace_id)]

    async def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = 30) -> None:
        """Until `condition` holds of the spans; exporters send twice a second."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.05)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for group in request.resource_spans:
        resource = {a.key: a.value.string_value for a in group.resource.attributes}
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield CollectedSpan(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                service=resource["service.name"],
                service_id=resource["service.instance.id"],
                attributes={a.key: _value(a.value) for a in span.attributes},
                links=frozenset(link.span_id.hex() for link in span.links),
            )


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [element.string_value for element in value.array_value.values]
    found: Value = getattr(value, kind or "string_value")
    return found
