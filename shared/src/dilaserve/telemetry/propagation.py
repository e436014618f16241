"""Trace context across the bus: W3C `traceparent` headers. Uses no global propagator."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


def inject(context: Context | None = None) -> dict[str, str]:
    """Headers that carry `context` (default: the current one); empty without a span in it."""
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context)
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The context that `headers` carry, whatever the case of their names; a root without one.

    The caller's current context plays no part. A stored traceparent is read by
    `extract({"traceparent": record.request.traceparent})`.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    return TraceContextTextMapPropagator().extract(lower, Context())
