"""Metrics of the planner. Gauges read a snapshot, since they may be read on another thread."""

from __future__ import annotations

from dilaserve.telemetry import Telemetry
from dilaserve_reconfigurator.record import CarriedOut, PlanRecord

__all__ = ["PlannerMetrics"]

Values = list[tuple[float, dict[str, str]]]


class PlannerMetrics:
    """Counts plans, and shows how far the last one's optimisation got."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._objective: Values = []
        self._gap: Values = []
        telemetry.gauge("dilaserve:plan_objective", lambda: self._objective)
        telemetry.gauge("dilaserve:plan_gap", lambda: self._gap)

    def made(self, record: PlanRecord, seconds: float) -> None:
        """A plan was made."""
        self._telemetry.count("dilaserve:plans_total", verdict=record.verdict)
        self._telemetry.observe("dilaserve:plan_seconds", seconds)
        if record.best is not None and record.best.objectives:
            found = record.best.objectives
            self._objective = [(each.value, {"objective": each.name}) for each in found]
            self._gap = [
                (each.gap, {"objective": each.name}) for each in found if each.gap is not None
            ]

    def applied(self, carried: CarriedOut) -> None:
        """A plan was carried out, or not."""
        self._telemetry.count("dilaserve:plans_applied_total", outcome=carried.phase)
        self._telemetry.observe("dilaserve:plan_execution_seconds", carried.seconds)
        self._telemetry.count("dilaserve:plan_pause_seconds_total", carried.pause_s)

    def failed(self) -> None:
        """No plan could be made."""
        self._telemetry.count("dilaserve:plans_total", verdict="failed")

    def dropped(self) -> None:
        """A message made no sense."""
        self._telemetry.count("dilaserve:messages_dropped_total", reason="invalid")
