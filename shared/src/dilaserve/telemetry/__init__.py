"""Metrics, traces and logs of a process, under the names that `names.py` declares.

One `Telemetry` object per process, passed in; nothing global, so several live in one test. It
knows no service: what a number means is said by its row in METRICS, a span by its row in SPANS.
"""

from __future__ import annotations

from dilaserve.telemetry.names import METRICS, SPANS, Metric, Span
from dilaserve.telemetry.propagation import extract, inject
from dilaserve.telemetry.telemetry import GaugeCallback, Telemetry

__all__ = ["METRICS", "SPANS", "GaugeCallback", "Metric", "Span", "Telemetry", "extract", "inject"]
