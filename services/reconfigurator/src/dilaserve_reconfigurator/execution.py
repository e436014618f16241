"""Carries out one transition, step by step. Sans-IO: told what happened, says what to do next.

    draining ──all drained──▶ stopping ──all ended──▶ launching ──up──▶ next step … done
        │ late                                            │ failed, as often as it is tried
        ▼                                                 ▼
    given up, nothing has ended                       undoing ──what had run there is up──▶ given up

Keeps nothing that a crash could lose: after one, a new execution starts from what then runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dilaserve_reconfigurator.route import Route, Step
from dilaserve_reconfigurator.stage2 import Placed, Slot

__all__ = [
    "Abort",
    "Drain",
    "Drained",
    "Effect",
    "Ended",
    "Event",
    "Execution",
    "Failed",
    "Launch",
    "Patience",
    "Phase",
    "Resume",
    "Stop",
    "Up",
]

Phase = Literal["draining", "stopping", "launching", "undoing", "done", "given_up"]


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the scheduler to empty this instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Take that back: it stays."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End this instance's process."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start an instance; `attempt` is told back by Up and Failed."""

    slot: Slot
    attempt: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End what was launched and is late; Failed says that its GPUs are free."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Drained:
    """It holds nothing any more, or is gone."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Its process is gone, and its GPUs are free."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Up:
    """What was launched serves."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Failed:
    """What was launched has ended instead of serving, and its GPUs are free."""

    attempt: int
    reason: str


Effect = Drain | Resume | Stop | Launch | Abort
Event = Drained | Ended | Up | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds to wait before something counts as failed."""

    drain_s: float = 60.0
    launch_s: float = 300.0
    n_launches: int = 2
    """Tries of one launch."""


class Execution:
    """One transition under way. Each call returns what to do; `wake_at` says when to call `tick`
    if nothing happens before."""

    def __init__(self, route: Route, running: Sequence[Placed], patience: Patience) -> None:
        self._steps = list(route.steps)
        self._slots = {placed.instance_id: placed.slot for placed in running}
        self._patience = patience
        self._pending: set[str] = set()
        self._queue: list[Slot] = []
        self._attempt = 0
        self._n_tries = 0
        self._deadline_s: float | None = None
        self._step: Step | None = None
        self.phase: Phase = "done"
        self.reason = ""
        """Why it was given up."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase in ("done", "given_up")

    def wake_at(self) -> float | None:
        """When patience ends."""
        return None if self.is_over else self._deadline_s

    def start(self, now: float) -> list[Effect]:
        """Begin the first step."""
        return self._next_step(now)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Something has happened. What belongs to no step under way changes nothing."""
        match event:
            case Drained() if self.phase == "draining":
                return self._drained(now, event.instance_id)
            case Ended() if self.phase == "stopping":
                return self._ended(now, event.instance_id)
            case Up() if event.attempt == self._attempt and self._is_launching:
                return self._up(now)
            case Failed() if event.attempt == self._attempt and self._is_launching:
                return self._failed(now, event.reason)
            case _:
                return []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self._deadline_s is None or now < self._deadline_s or self.is_over:
            return []
        match self.phase:
            case "draining":  # nothing has ended yet: all can stay as it is
                return self._stay()
            case "stopping":  # a launcher ends what it stops; there is no other way on
                self._deadline_s = now + self._patience.drain_s
                return [Stop(name) for name in sorted(self._pending)]
            case _:  # it must be gone before its GPUs are used again
                self._deadline_s = now + self._patience.launch_s
                return [Abort(self._attempt)]

    @property
    def _is_launching(self) -> bool:
        return self.phase in ("launching", "undoing")

    def _next_step(self, now: float) -> list[Effect]:
        if not self._steps:
            self.phase, self._deadline_s = "done", None
            return []
        self._step = self._steps.pop(0)
        self._pending = set(self._step.terminate)
        if not self._pending:
            return self._begin_launch(now)
        self.phase, self._deadline_s = "draining", now + self._patience.drain_s
        return [Drain(name) for name in sorted(self._pending)]

    def _stay(self) -> list[Effect]:
        assert self._step is not None
        late = ", ".join(sorted(self._pending))
        self._give_up(f"{late} did not get empty in {self._patience.drain_s:g} s")
        return [Resume(name) for name in self._step.terminate]

    def _drained(self, now: float, instance_id: str) -> list[Effect]:
        self._pending.discard(instance_id)
        if self._pending:
            return []
        assert self._step is not None
        self._pending = set(self._step.terminate)
        self.phase, self._deadline_s = "stopping", now + self._patience.drain_s
        return [Stop(name) for name in sorted(self._pending)]

    def _ended(self, now: float, instance_id: str) -> list[Effect]:
        self._pending.discard(instance_id)
        return [] if self._pending else self._begin_launch(now)

    def _begin_launch(self, now: float) -> list[Effect]:
        assert self._step is not None
        if self._step.launch is None:
            return self._next_step(now)
        self.phase, self._queue, self._n_tries = "launching", [self._step.launch], 0
        return self._launch(now)

    def _launch(self, now: float) -> list[Effect]:
        self._attempt += 1
        self._n_tries += 1
        self._deadline_s = now + self._patience.launch_s
        return [Launch(self._queue[0], self._attempt)]

    def _up(self, now: float) -> list[Effect]:
        self._queue.pop(0)
        if self._queue:
            self._n_tries = 0
            return self._launch(now)
        return self._give_up(self.reason) if self.phase == "undoing" else self._next_step(now)

    def _failed(self, now: float, reason: str) -> list[Effect]:
        if self._n_tries < self._patience.n_launches:
            return self._launch(now)
        if self.phase == "undoing":
            self.reason = f"{self.reason}; nor could {_text(self._queue[0])} be launched again"
            self._queue.pop(0)
        else:
            assert self._step is not None
            self.phase, self.reason = "undoing", reason
            self._queue = [self._slots[name] for name in self._step.terminate]
        self._n_tries = 0
        return self._launch(now) if self._queue else self._give_up(self.reason)

    def _give_up(self, reason: str) -> list[Effect]:
        self.phase, self.reason, self._deadline_s = "given_up", reason, None
        return []


def _text(slot: Slot) -> str:
    return f"TP-{slot.tp_degree} on node {slot.node}, GPU {', '.join(map(str, slot.gpus))}"
