"""The `Telemetry` of a process: counts, observes, traces, and renders for Prometheus.

The OpenTelemetry SDK counts and traces; each object has providers and a registry of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import Counter, Histogram, Observation
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from dilaserve import __version__
from dilaserve.errors import SettingsError
from dilaserve.settings import CommonSettings
from dilaserve.telemetry import listener, logs, metering, tracing
from dilaserve.telemetry.names import METRICS, Metric

Labels = Mapping[str, object]
GaugeCallback = Callable[[], Iterable[tuple[float, Labels]]]
"""Called at each rendering, maybe on the listener's thread: read a few numbers and return."""


class Telemetry:
    """Metrics, tracer and logging of one process. Safe to use from several threads.

    Names and labels are those of `names.py`; anything undeclared raises ValueError.
    """

    def __init__(self, resource: Resource, exporter: SpanProcessor | None = None) -> None:
        """Prefer `start` and `for_tests`."""
        self._meter = metering.Meter(resource)
        self._spans = tracing.DeclaredSpans()
        self._provider: TracerProvider = tracing.build_provider(resource, self._spans, exporter)
        self._instruments = self._meter.build_instruments(METRICS.values())
        self._emitted: set[str] = set()
        self._gauges: set[str] = set()
        self._bad_gauge: ValueError | None = None
        self._closed = False
        self._rendering = threading.Lock()
        self._memory: InMemorySpanExporter | None = None
        self._listener: listener.MetricsListener | None = None
        self._log_handler: logs.LineHandler | None = None
        self.is_tracing = exporter is not None
        """Whether spans go anywhere; where not, nobody misses those of every pass."""
        self.tracer: Tracer = self._provider.get_tracer("dilaserve", __version__)

    @classmethod
    def start(cls, *, service: str, service_id: str, settings: CommonSettings) -> Telemetry:
        """Telemetry of a service's process: logs to stderr, exports spans if an OTLP endpoint is
        set, listens for Prometheus if a metrics port is. Raises SettingsError for a bad setting.
        """
        exporter = tracing.build_exporter(settings.otlp_endpoint)
        telemetry = cls(_resource(service, service_id), exporter)
        try:
            telemetry._open(service, service_id, settings)
        except SettingsError:
            telemetry.close()
            raise
        return telemetry

    @classmethod
    def for_tests(cls, service: str = "test") -> Telemetry:
        """Telemetry that keeps its spans in memory and touches neither network nor logging."""
        memory = InMemorySpanExporter()
        telemetry = cls(_resource(service, f"{service}-0000"), SimpleSpanProcessor(memory))
        telemetry._memory = memory
        return telemetry

    @property
    def address(self) -> str:
        """`host:port` of the Prometheus listener; empty without one."""
        return self._listener.address if self._listener else ""

    def count(self, name: str, amount: float = 1, /, **labels: object) -> None:
        """Add `amount` (>= 0) to a counter."""
        counter = self._instrument(name, "counter", labels)
        assert isinstance(counter, Counter)
        counter.add(amount, _attributes(labels))

    def observe(self, name: str, value: float, /, **labels: object) -> None:
        """Put `value`, in the unit declared, into a histogram."""
        histogram = self._instrument(name, "histogram", labels)
        assert isinstance(histogram, Histogram)
        histogram.record(value, _attributes(labels))

    def gauge(self, name: str, callback: GaugeCallback, /) -> None:
        """Read a gauge by `callback` at each rendering; one callback a gauge."""
        metric = _declared(name, "gauge")
        if name in self._gauges:
            raise ValueError(f"gauge {name!r} has a callback already; let one yield all its values")
        self._gauges.add(name)
        self._meter.create_gauge(metric, lambda _: self._observations(metric, callback))

    def render(self) -> tuple[bytes, str]:
        """The Prometheus text of all metrics, and its content type."""
        with self._rendering:
            text = self._meter.render()
            bad, self._bad_gauge = self._bad_gauge, None
        if bad is not None:
            raise bad
        return text, metering.CONTENT_TYPE

    def emitted(self) -> frozenset[str]:
        """Names of all metrics and spans used so far (a gauge: read with at least one value)."""
        return frozenset(self._emitted | self._spans.started)

    def finished_spans(self) -> tuple[ReadableSpan, ...]:
        """All ended spans, oldest first; only for `for_tests`."""
        if self._memory is None:
            raise ValueError("spans are kept by Telemetry.for_tests() only; use that")
        return self._memory.get_finished_spans()

    def close(self) -> None:
        """Export what is left (a few seconds at most), stop listening and logging. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        self._provider.shutdown()
        self._meter.close()
        if self._log_handler is not None:
            logs.remove(self._log_handler)

    def _open(self, service: str, service_id: str, settings: CommonSettings) -> None:
        self._log_handler = logs.install(settings.log_level, service_id)
        self._start_counters(service)
        if settings.metrics_port >= 0:
            self._listener = listener.MetricsListener(
                settings.metrics_host, settings.metrics_port, self.render
            )

    def _instrument(self, name: str, kind: str, labels: Labels) -> Counter | Histogram:
        metric = _declared(name, kind)
        _check_labels(metric, labels)
        self._emitted.add(name)
        return self._instruments[name]

    def _observations(self, metric: Metric, callback: GaugeCallback) -> Iterable[Observation]:
        """OpenTelemetry logs what a callback raises; a bad label is kept for `render` to raise."""
        for value, labels in callback():
            try:
                _check_labels(metric, labels)
            except ValueError as error:
                self._bad_gauge = error
                return
            self._emitted.add(metric.name)
            yield Observation(value, _attributes(labels))

    def _start_counters(self, service: str) -> None:
        """Show the service's unlabelled counters from 0 on, so that the first rise is a rate."""
        for metric in METRICS.values():
            if metric.kind == "counter" and service in metric.services and not metric.labels:
                counter = self._instruments[metric.name]
                assert isinstance(counter, Counter)
                counter.add(0)


def _resource(service: str, service_id: str) -> Resource:
    return Resource(
        {
            "service.name": f"dilaserve-{service}",
            "service.instance.id": service_id,
            "service.version": __version__,
        }
    )


def _declared(name: str, kind: str) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind != kind:
        raise ValueError(f"{kind} {name!r} is not declared; add it to dilaserve/telemetry/names.py")
    return metric


def _check_labels(metric: Metric, labels: Labels) -> None:
    if len(labels) != len(metric.labels) or not all(label in labels for label in metric.labels):
        raise ValueError(
            f"{metric.name!r} takes the labels {sorted(metric.labels)}, not {sorted(labels)}; "
            "change the call, or the row in dilaserve/telemetry/names.py"
        )


def _attributes(labels: Labels) -> dict[str, str]:
    return {name: str(value) for name, value in labels.items()}
