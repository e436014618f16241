"""Metrics of the predictor. Gauges read a snapshot, since they may be read on another thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dilaserve.telemetry import Telemetry
from dilaserve_predictor.drift import Comparison, Score
from dilaserve_predictor.model import ModelInfo

__all__ = ["Outcome", "PredictorMetrics", "Recorded"]

Outcome = Literal["answered", "untrained", "other_model"]
Recorded = Literal["written", "incomplete", "failed"]
Values = list[tuple[float, dict[str, str]]]


class PredictorMetrics:
    """Of one language model's predictor."""

    def __init__(self, telemetry: Telemetry, model_id: str) -> None:
        self._telemetry = telemetry
        self._model_id = model_id
        self._wmape: Values = []
        self._coverage: Values = []
        telemetry.gauge("dilaserve:predictor_wmape", lambda: self._wmape)
        telemetry.gauge("dilaserve:predictor_upper_coverage", lambda: self._coverage)

    def asked(self, outcome: Outcome, n_requests: int) -> None:
        """A question about so many requests was dealt with."""
        self._telemetry.count("dilaserve:prediction_requests_total", n_requests, outcome=outcome)

    def evaluated(self, n_requests: int, seconds: float) -> None:
        """The trees were evaluated for so many requests at once."""
        self._telemetry.observe("dilaserve:prediction_batch_requests", n_requests)
        self._telemetry.observe("dilaserve:prediction_seconds", seconds)

    def compared(self, comparisons: Sequence[Comparison]) -> None:
        """Predictions were held against what happened."""
        for each in comparisons:
            self._telemetry.count("dilaserve:predictions_compared_total", until=each.until)

    def loaded(self, outcome: Literal["loaded", "unusable"]) -> None:
        """The predictor's folder held something new."""
        self._telemetry.count("dilaserve:predictor_loads_total", outcome=outcome)

    def recorded(self, outcome: Recorded) -> None:
        """A served request has ended, and recording is on."""
        self._telemetry.count("dilaserve:recorded_runs_total", outcome=outcome)

    def dropped(self) -> None:
        """A message made no sense."""
        self._telemetry.count("dilaserve:messages_dropped_total", reason="invalid")

    def refresh(self, info: ModelInfo | None, served: Score) -> None:
        """Take new values for the gauges."""
        trained = info.errors["full"].wmape if info is not None else None
        coverage = info.upper_coverage if info is not None else None
        self._wmape = self._by_basis(trained, served.wmape)
        self._coverage = self._by_basis(coverage, served.coverage)

    def _by_basis(self, trained: float | None, served: float | None) -> Values:
        values = {"trained": trained, "served": served}
        return [
            (value, {"model_name": self._model_id, "basis": basis})
            for basis, value in values.items()
            if value is not None
        ]
