"""Spans as they arrive from several processes → one tree of text a request. Knows no network."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["TraceTrees"]

TOP = "gateway.request"
SETTLE_S = 1.5
"""Exporters send twice a second, so by then all processes have sent theirs."""
KEEP_S = 600.0
"""A trace whose gateway has not sent its span by then is forgotten."""
GZIP = b"\x1f\x8b"
SHOWN = ("outcome", "cause", "epoch", "steps", "threshold")
PREFIX = "dilaserve."


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    span_id: bytes
    parent_id: bytes
    service_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]


@dataclass(slots=True)
class _Trace:
    spans: list[_Span] = field(default_factory=list)
    last_s: float = 0.0

    @property
    def request_id(self) -> str:
        ids = (span.attributes.get("dilaserve.request_id") for span in self.spans)
        return next(filter(None, ids), "")

    @property
    def has_top(self) -> bool:
        return any(span.name == TOP for span in self.spans)


class TraceTrees:
    """Collects spans; gives out the traces of requests that ended. Forward passes, which are traces
    of their own, are left out."""

    def __init__(self) -> None:
        self._traces: dict[bytes, _Trace] = {}

    def add(self, body: bytes, now_s: float) -> None:
        """Take an OTLP/HTTP body, gzipped or not. Raises google.protobuf's DecodeError for what is
        none."""
        plain = gzip.decompress(body) if body.startswith(GZIP) else body
        for trace_id, span in _parse(ExportTraceServiceRequest.FromString(plain)):
            if span.name == "worker.step":
                continue
            trace = self._traces.setdefault(trace_id, _Trace())
            trace.spans.append(span)
            trace.last_s = now_s

    def take_complete(self, now_s: float) -> Iterator[list[str]]:
        """The lines of each trace whose gateway's span is there and whose others have had time to
        come; each is given once."""
        for trace_id, trace in list(self._traces.items()):
            if now_s - trace.last_s < (SETTLE_S if trace.has_top else KEEP_S):
                continue
            del self._traces[trace_id]
            if trace.has_top:
                yield [f"trace {trace_id.hex()} {trace.request_id}".rstrip(), *_tree(trace.spans)]


def _parse(request: ExportTraceServiceRequest) -> Iterator[tuple[bytes, _Span]]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield (
                span.trace_id,
                _Span(
                    name=span.name,
                    span_id=span.span_id,
                    parent_id=span.parent_span_id,
                    service_id=resource.get("service.instance.id", "?"),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                ),
            )


def _attributes(pairs: object) -> dict[str, str]:
    return {pair.key: _text(pair.value) for pair in pairs}  # type: ignore[attr-defined]


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    return "" if kind is None else str(getattr(value, kind))


def _tree(spans: list[_Span]) -> Iterator[str]:
    """A line a span, oldest first, its children indented below it."""
    ids = {span.span_id for span in spans}
    first_ns = min(span.start_ns for span in spans)

    def below(parent_id: bytes, depth: int) -> Iterator[str]:
        children = [s for s in spans if s.parent_id == parent_id]
        for span in sorted(children, key=lambda span: span.start_ns):
            yield _line(span, depth, first_ns)
            yield from below(span.span_id, depth + 1)

    for root in sorted({s.parent_id for s in spans if s.parent_id not in ids}):
        yield from below(root, 0)


def _line(span: _Span, depth: int, first_ns: int) -> str:
    name = "  " * depth + span.name
    at_ms, took_ms = (span.start_ns - first_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
    known = {key.removeprefix(PREFIX): value for key, value in span.attributes.items()}
    details = " ".join(f"{key}={known[key]}" for key in SHOWN if known.get(key))
    times = f"at {at_ms:8.1f} ms  took {took_ms:8.1f} ms"
    return f"{name:<24} {span.service_id:<16} {times}  {details}".rstrip()
