"""Spans: a provider of the process's own, and export by OTLP/HTTP that never holds anything up."""

from __future__ import annotations

from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from dilaserve.errors import SettingsError
from dilaserve.telemetry.names import SPANS

QUEUE_SPANS = 2048
"""Spans kept while the collector does not answer; the oldest go first. One export takes them all,
so that a process ends after two time-outs at worst."""
EXPORT_TIMEOUT_S = 2.0
EXPORT_INTERVAL_S = 0.5


class DeclaredSpans(SpanProcessor):
    """Remembers the names of started spans; raises ValueError for one that SPANS lacks."""

    def __init__(self) -> None:
        self.started: set[str] = set()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Called by the SDK in the thread that starts the span."""
        if span.name not in SPANS:
            raise ValueError(
                f"span {span.name!r} is not declared; add it to dilaserve/telemetry/names.py"
            )
        self.started.add(span.name)


def build_provider(
    resource: Resource, declared: DeclaredSpans, exporter: SpanProcessor | None
) -> TracerProvider:
    """A provider that checks names and hands ended spans to `exporter`, if any. A span whose
    remote parent is not sampled is not recorded."""
    provider = TracerProvider(
        sampler=sampling.ParentBased(sampling.ALWAYS_ON), resource=resource, shutdown_on_exit=False
    )
    provider.add_span_processor(declared)
    if exporter is not None:
        provider.add_span_processor(exporter)
    return provider


def build_exporter(endpoint: str) -> SpanProcessor | None:
    """A background exporter to an OTLP/HTTP collector; None for an empty endpoint.

    Raises SettingsError for what is no HTTP URL. A collector that is down costs spans, never time.
    """
    if not endpoint:
        return None
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise SettingsError(
            f"DILASERVE_OTLP_ENDPOINT={endpoint!r} is no HTTP URL; use for example "
            "http://127.0.0.1:4318"
        )
    silent = NoOpMeterProvider()
    return BatchSpanProcessor(
        OTLPSpanExporter(
            endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S, meter_provider=silent
        ),
        max_queue_size=QUEUE_SPANS,
        max_export_batch_size=QUEUE_SPANS,
        schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
        meter_provider=silent,
    )
