"""Counts what happens in one run, for the whole of it and for each slot of time. Judges nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dilaserve_bench.twin.engine import VirtualPlan
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.worker import VirtualWorker
from dilaserve_gpu_worker.engine.types import StepOutput
from dilaserve_scheduler.core.effects import Reassign

__all__ = ["Gaps", "Measurements", "Slot"]


@dataclass(slots=True)
class Slot:
    """Steps and passes that ended in a slot of time."""

    n_steps: int = 0
    threshold_sum: float = 0.0
    busy_s: float = 0.0


class Gaps:
    """How long each cache step let its request wait: from the end of the step before to its own.
    Those of recompute steps are left out: a request may have waited for an instance before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._stepped: dict[str, float] = {}

    def note(self, now: float, steps: list[StepOutput]) -> None:
        """Steps that end now."""
        stepped = self._stepped
        for step in steps:
            if step.kind == "cache":
                self.seconds.append(now - stepped[step.request_id])
            stepped[step.request_id] = now


class Measurements:
    """See PassObserver. `gaps`: where they are kept, if anybody wants to know."""

    def __init__(self, timeline: Timeline, *, slot_s: float, gaps: Gaps | None = None) -> None:
        self.slot_s = slot_s
        self.gaps = gaps
        self.slots: dict[int, Slot] = {}
        """By number, from 0; only those in which a pass ended."""
        self.n_steps = self.n_tokens = 0
        self.threshold_sum = self.token_threshold_sum = 0.0
        self.n_recompute = self.n_cache = 0
        self.moves: Counter[str] = Counter()
        """Changes of owner by cause, as asked of the store."""
        self.n_passes = self.n_rows = self.n_rebuilds = self.n_computed = 0
        """`n_computed`: tokens, over all passes."""
        self._timeline = timeline

    def passed(
        self, worker: VirtualWorker, seconds: float, plan: VirtualPlan, steps: list[StepOutput]
    ) -> None:
        """See PassObserver."""
        threshold_sum = token_threshold_sum = 0.0
        n_tokens = n_cache = 0
        for step in steps:
            threshold, n_new = step.threshold, len(step.tokens)
            threshold_sum += threshold
            token_threshold_sum += threshold * n_new
            n_tokens += n_new
            if step.kind == "cache":
                n_cache += 1
        self.n_steps += len(steps)
        self.n_tokens += n_tokens
        self.threshold_sum += threshold_sum
        self.token_threshold_sum += token_threshold_sum
        self.n_cache += n_cache
        self.n_recompute += len(steps) - n_cache
        self.n_passes += 1
        self.n_rows += len(plan.rows)
        self.n_rebuilds += plan.n_rebuilds
        self.n_computed += plan.n_tokens
        slot = self._slot()
        slot.n_steps += len(steps)
        slot.threshold_sum += threshold_sum
        slot.busy_s += seconds
        if self.gaps is not None:
            self.gaps.note(self._timeline.now, steps)

    def moving(self, call: Reassign) -> None:
        """A request is to change its owner."""
        self.moves[call.cause] += 1

    def _slot(self) -> Slot:
        number = int(self._timeline.now / self.slot_s)
        slot = self.slots.get(number)
        if slot is None:
            slot = self.slots[number] = Slot()
        return slot
