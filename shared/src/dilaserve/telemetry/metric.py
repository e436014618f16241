"""What a row in the registry of metrics is, and the buckets that histograms share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilaserve.telemetry.spans import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Latencies of requests and steps."""
SHORT_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Decisions and round trips."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
SMALL_COUNTS = (1, 2, 5, 10, 20)
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric; `name` is what Prometheus sees, with `_total` on every counter."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """UCUM: `s`, `By`, `1` or an annotation such as `{token}`; seconds are in the name too."""
    help: str
    services: tuple[Service, ...]
    labels: tuple[str, ...] = ()
    """Each use gives exactly these."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, inclusive; histograms only."""
