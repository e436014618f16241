"""OpenTelemetry's meter, seen by Prometheus under the exact names declared.

Instrument names may not hold a colon, so `vllm:x` is counted as `vllm.x` and a view gives it its
Prometheus name back. Knows nothing of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest

from dilaserve import __version__
from dilaserve.telemetry.names import METRICS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Meter:
    """A meter provider with one Prometheus registry of its own."""

    def __init__(self, resource: Resource) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self._provider = MeterProvider(
            [reader],
            resource,
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
            views=[_view(metric) for metric in METRICS.values()],
        )
        self._meter = self._provider.get_meter("dilaserve", __version__)

    def build_instruments(self, metrics: Iterable[Metric]) -> dict[str, Counter | Histogram]:
        """A counter or histogram for each metric that is one, by its declared name."""
        instruments: dict[str, Counter | Histogram] = {}
        for metric in metrics:
            name = _instrument_name(metric)
            if metric.kind == "counter":
                instruments[metric.name] = self._meter.create_counter(
                    name, metric.unit, metric.help
                )
            elif metric.kind == "histogram":
                instruments[metric.name] = self._meter.create_histogram(
                    name, metric.unit, metric.help
                )
        return instruments

    def create_gauge(
        self, metric: Metric, callback: Callable[[CallbackOptions], Iterable[Observation]]
    ) -> None:
        """Read `metric` by `callback` at each rendering."""
        self._meter.create_observable_gauge(
            _instrument_name(metric), [callback], metric.unit, metric.help
        )

    def render(self) -> bytes:
        """The Prometheus text, format 0.0.4."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop collecting."""
        self._provider.shutdown()


def _instrument_name(metric: Metric) -> str:
    return metric.name.replace(":", ".")


def _view(metric: Metric) -> View:
    if metric.kind != "histogram":
        return View(instrument_name=_instrument_name(metric), name=metric.name)
    return View(
        instrument_name=_instrument_name(metric),
        name=metric.name,
        aggregation=ExplicitBucketHistogramAggregation(
            [float(bound) for bound in metric.buckets], record_min_max=False
        ),
    )
