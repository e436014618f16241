"""Metrics of the scheduler, read off the core's events and effects."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from dilaserve.messages import Admitted, Refused, StepResult
from dilaserve.telemetry import Telemetry
from dilaserve_scheduler.core import Core
from dilaserve_scheduler.core.effects import Effect, Fail, FailCause, Reassign, Reply, Send
from dilaserve_scheduler.core.events import Event

__all__ = ["SchedulerMetrics"]


class SchedulerMetrics:
    """Counts, and the last values of gauges: dictionaries that are replaced and never changed,
    since they may be read on another thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._term = 0
        self._waiting: dict[str, int] = {}
        self._by_state: dict[str, int] = {}
        self._live_by_degree: dict[int, int] = {}
        for cause in get_args(FailCause):
            telemetry.count("dilaserve:failures_total", 0, cause=cause)
        telemetry.gauge("dilaserve:scheduler_term", lambda: [(self._term, {})])
        telemetry.gauge(
            "vllm:num_requests_waiting",
            lambda: [(n, {"model_name": model}) for model, n in self._waiting.items()],
        )
        telemetry.gauge(
            "dilaserve:instances",
            lambda: [(n, {"state": state}) for state, n in self._by_state.items()],
        )
        telemetry.gauge(
            "dilaserve:live_instances",
            lambda: [(n, {"tp_degree": degree}) for degree, n in self._live_by_degree.items()],
        )

    def decided(self, event: Event, seconds: float, effects: list[Effect]) -> None:
        """The core has handled an event."""
        name = type(event).__name__
        self._telemetry.observe("dilaserve:decision_seconds", seconds, event=name)
        if isinstance(event, StepResult):
            n_fenced = sum(item.outcome == "fenced" for item in event.items)
            self._telemetry.count("dilaserve:fenced_results_total", n_fenced)
        self.effects(effects)

    def effects(self, effects: list[Effect]) -> None:
        """What the core wants done."""
        for effect in effects:
            match effect:
                case Send():
                    self._telemetry.count("dilaserve:commands_total")
                case Reassign(cause=cause):
                    self._telemetry.count("dilaserve:reassignments_total", cause=cause)
                case Fail(cause=cause):
                    self._telemetry.count("dilaserve:failures_total", cause=cause)
                case Reply(answer=Admitted()):
                    self._telemetry.count("dilaserve:admissions_total", outcome="admitted")
                case Reply(answer=Refused(code=code)):
                    self._telemetry.count("dilaserve:admissions_total", outcome=code)
                case _:
                    pass

    def dropped(self, reason: str) -> None:
        """A message was dropped: `invalid`, or `unsent` (the bus was down)."""
        self._telemetry.count("dilaserve:messages_dropped_total", reason=reason)

    def refresh(self, core: Core, now: float) -> None:
        """Take new values for the gauges."""
        live: Counter[int] = Counter(dict.fromkeys(self._live_by_degree, 0))
        for instance in core.instances():
            if instance.info is not None and core.is_live(now, instance):
                live[instance.info.tp_degree] += 1
        states = Counter(core.state_of(now, instance) for instance in core.instances())
        self._term = core.term
        self._waiting = core.n_waiting_by_model()
        self._live_by_degree = dict(live)
        self._by_state = {state: states[state] for state in ("live", "draining", "dead")}
