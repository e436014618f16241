"""How fast the cluster has been lately: completed tokens a second, steps per output token.

Observation only; a step predictor knows better about a single request.
"""

from __future__ import annotations

import math

from dilaserve_scheduler.core.model import Request

__all__ = ["Pace"]

WINDOW_S = 30.0
"""Completions fade with this time constant."""
SMOOTHING = 0.05
FIRST_STEPS_PER_TOKEN = 1.0
"""One token a step, the worst case, until a request has finished."""
FIRST_STEP_S = 0.1


class Pace:
    """Learns from requests that finish."""

    def __init__(self) -> None:
        self._steps_per_token = 0.0
        self._faded_tokens = 0.0
        self._started_at: float | None = None
        self._faded_at = 0.0
        self._finished_at = 0.0

    def finished(self, now: float, request: Request) -> None:
        """A request had its last token."""
        if self._started_at is None:
            self._started_at = self._faded_at = request.arrival_s
        self._fade(now)
        self._faded_tokens += request.n_tokens
        self._finished_at = now
        steps_per_token = request.step / request.n_output
        weight = SMOOTHING if self._steps_per_token else 1.0
        self._steps_per_token += weight * (steps_per_token - self._steps_per_token)

    def steps(self, request: Request) -> float:
        """Steps that the request is expected to need in all."""
        return request.n_output * (self._steps_per_token or FIRST_STEPS_PER_TOKEN)

    def time_left_s(self, request: Request, step_s: float) -> float:
        """Seconds from now to its last token on an instance with this step latency (0: unknown),
        if it does not wait."""
        left = 1.0 - request.n_unmasked / request.n_output
        return self.steps(request) * left * (step_s or FIRST_STEP_S)

    def drain_s(self, now: float, n_tokens: int) -> float | None:
        """Seconds until so many tokens (full lengths) are completed at the recent rate; None if
        nothing was completed lately."""
        if self._started_at is None or now - self._finished_at > 2 * WINDOW_S:
            return None
        self._fade(now)
        span_s = WINDOW_S * -math.expm1(-(now - self._started_at) / WINDOW_S)
        rate = self._faded_tokens / span_s if span_s > 0 else 0.0
        return n_tokens / rate if rate > 0 else None

    def _fade(self, now: float) -> None:
        self._faded_tokens *= math.exp(-max(now - self._faded_at, 0.0) / WINDOW_S)
        self._faded_at = max(now, self._faded_at)
