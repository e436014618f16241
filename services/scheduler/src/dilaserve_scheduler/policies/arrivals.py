"""What arrives lately: how often, and how large. Knows no request that is there."""

from __future__ import annotations

import math

from dilaserve_scheduler.core.model import Request

__all__ = ["Arrivals"]

WINDOW_S = 15.0
"""Arrivals fade with this time constant."""
LEAST_SPAN_S = 0.7
"""So long at least the rate is averaged over, lest a first arrival look like a flood."""


class Arrivals:
    """Of one priority. Means are over the same fading window."""

    def __init__(self) -> None:
        self.count = self._n_output = self._n_full = self._n_cache = 0.0
        """Arrivals that have not faded."""
        self._n_blocks = self._slo_s = 0.0
        self._since: float | None = None
        self._faded_at = 0.0

    def observe(self, now: float, request: Request, *, n_cache: int, slo_s: float) -> None:
        """A request has arrived."""
        if self._since is None:
            self._since = self._faded_at = now
        self._fade(now)
        self.count += 1.0
        self._n_output += request.n_output
        self._n_full += request.n_tokens
        self._n_cache += n_cache
        self._n_blocks += request.n_blocks
        self._slo_s += slo_s

    def rate(self, now: float) -> float:
        """Arrivals a second."""
        if self._since is None:
            return 0.0
        self._fade(now)
        span_s = WINDOW_S * -math.expm1(-max(now - self._since, LEAST_SPAN_S) / WINDOW_S)
        return self.count / span_s

    def mean(self) -> tuple[float, float, float, float, float]:
        """(output, full length, tokens of a cache step, blocks, SLO) of the mean arrival."""
        n = max(self.count, 1e-9)
        sums = (self._n_output, self._n_full, self._n_cache, self._n_blocks, self._slo_s)
        output, full, cache, blocks, slo_s = (total / n for total in sums)
        return output, full, cache, blocks, slo_s

    def _fade(self, now: float) -> None:
        keep = math.exp(-max(now - self._faded_at, 0.0) / WINDOW_S)
        self._faded_at = max(now, self._faded_at)
        self.count *= keep
        self._n_output *= keep
        self._n_full *= keep
        self._n_cache *= keep
        self._n_blocks *= keep
        self._slo_s *= keep
