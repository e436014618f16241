"""Carries out one transition, step by step. Sans-IO: told what happened, says what to do next.

    draining ──all empty, or late──▶ stopping ──all ended──▶ launching ──up──▶ next step … done
        │ one that was to serve has died                         │ failed, as often as it is tried,
        ▼                                                        ▼ there and elsewhere
    cut short, nothing has ended               undoing ──what had run there is up──▶ given up

Keeps nothing that a crash could lose: after one, a new execution starts from what then runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dilaserve_reconfigurator.capacity import Capacity
from dilaserve_reconfigurator.elsewhere import other_slot
from dilaserve_reconfigurator.route import Route, Step
from dilaserve_reconfigurator.stage2 import Placed, Slot

__all__ = [
    "Abort",
    "Drain",
    "Drained",
    "Effect",
    "End",
    "Ended",
    "Event",
    "Execution",
    "Failed",
    "Launch",
    "Lost",
    "Patience",
    "Phase",
    "Resume",
    "Stop",
    "Up",
]

End = Literal["done", "given_up", "cut_short"]
Phase = Literal["draining", "stopping", "launching", "undoing", "done", "given_up", "cut_short"]
"""cut_short: an instance has died, and going on would have taken capacity below the floor. What is
wanted stays so; a new route has to be found from what runs."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the scheduler empty this instance."""

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
    """What was launched serves, under this id."""

    attempt: int
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """What was launched has ended instead of serving, and its GPUs are free."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance has ended that nobody has stopped, and its GPUs are free."""

    instance_id: str


Effect = Drain | Resume | Stop | Launch | Abort
Event = Drained | Ended | Up | Failed | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds to wait before something counts as failed."""

    drain_s: float = 60.0
    """Then it is stopped all the same: what it still holds moves as it says goodbye."""
    launch_s: float = 300.0
    n_launches: int = 2
    """Tries of one launch in one place."""


class Execution:
    """One transition under way. Each call returns what to do; `wake_at` says when to call `tick`
    if nothing happens before."""

    def __init__(
        self,
        route: Route,
        running: Sequence[Placed],
        patience: Patience,
        *,
        nodes: Sequence[int] = (),
        floor: int = 0,
    ) -> None:
        """`nodes`: GPUs of each, where a launch that fails may be tried elsewhere. `floor`: GPUs
        that are to serve all the time."""
        self._steps = list(route.steps)
        self._slots = {placed.instance_id: placed.slot for placed in running}
        self._patience = patience
        self._nodes = tuple(nodes)
        self._floor = floor
        self.capacity = Capacity(running, floor)
        """What serves, and for how long that was too little."""
        self._pending: set[str] = set()
        self._queue: list[Slot] = []
        self._tried: set[Slot] = set()
        self._attempt = 0
        self._n_tries = 0
        self._deadline_s: float | None = None
        self._step: Step | None = None
        self.phase: Phase = "done"
        self.reason = ""
        """Why it was given up, or cut short."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase in ("done", "given_up", "cut_short")

    @property
    def end(self) -> End:
        """How it ended. Raises RuntimeError before."""
        match self.phase:
            case "done" | "given_up" | "cut_short":
                return self.phase
        raise RuntimeError(f"it is {self.phase}, and has not ended; wait until it is over")

    def wake_at(self) -> float | None:
        """When patience ends."""
        return None if self.is_over else self._deadline_s

    def start(self, now: float) -> list[Effect]:
        """Begin the first step."""
        self.capacity.begin(now)
        return self._next_step(now)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Something has happened. What belongs to no step under way changes nothing."""
        match event:
            case Drained() if self.phase == "draining":
                return self._drained(now, event.instance_id)
            case Ended() if self.phase == "stopping":
                return self._ended(now, event.instance_id)
            case Up() if event.attempt == self._attempt and self._is_launching:
                return self._up(now, event.instance_id)
            case Failed() if event.attempt == self._attempt and self._is_launching:
                return self._failed(now, event.reason)
            case Lost() if not self.is_over:
                return self._lost(now, event.instance_id)
            case _:
                return []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self._deadline_s is None or now < self._deadline_s or self.is_over:
            return []
        match self.phase:
            case "draining":
                return self._stop_all(now)
            case "stopping":  # a launcher ends what it stops; there is no other way on
                self._deadline_s = now + self._patience.drain_s
                return [Stop(name) for name in sorted(self._pending)]
            case _:  # it must be gone before its GPUs are used again
                self._deadline_s = now + self._patience.launch_s
                return [Abort(self._attempt)]

    @property
    def _is_launching(self) -> bool:
        return self.phase in ("launching", "undoing")

    # --- terminations --------------------------------------------------------------------------

    def _next_step(self, now: float) -> list[Effect]:
        if not self._steps:
            return self._end("done")
        self._step = self._steps.pop(0)
        self._tried.clear()
        self._pending = self.capacity.names() & set(self._step.terminate)
        if not self._pending:
            return self._begin_launch(now)
        if self._is_too_low():
            return self._cut_short()
        self.phase, self._deadline_s = "draining", now + self._patience.drain_s
        return [Drain(name) for name in sorted(self._pending)]

    def _is_too_low(self) -> bool:
        """Whether this step would take capacity below the floor, and was not planned to."""
        assert self._step is not None
        left = self.capacity.without(self._step.terminate)
        return left < min(self._floor, self._step.n_serving)

    def _lost(self, now: float, instance_id: str) -> list[Effect]:
        is_drained = instance_id not in self._pending
        if not self.capacity.lose(now, instance_id) or self.phase != "draining":
            return []
        assert self._step is not None
        if instance_id in self._step.terminate:
            return [] if is_drained else self._drained(now, instance_id)
        if not self._is_too_low():
            return []
        staying = sorted(self.capacity.names() & set(self._step.terminate))
        return [*(Resume(name) for name in staying), *self._cut_short()]

    def _cut_short(self) -> list[Effect]:
        died = ", ".join(sorted(self.capacity.lost)) or "an instance"
        self.reason = f"{died} has died, and {self._floor} GPUs are to serve all the time"
        return self._end("cut_short")

    def _drained(self, now: float, instance_id: str) -> list[Effect]:
        self._pending.discard(instance_id)
        return [] if self._pending else self._stop_all(now)

    def _stop_all(self, now: float) -> list[Effect]:
        assert self._step is not None
        self._pending = self.capacity.names() & set(self._step.terminate)
        self.phase, self._deadline_s = "stopping", now + self._patience.drain_s
        for name in self._pending:
            self.capacity.stop(now, name)
        if not self._pending:
            return self._begin_launch(now)
        return [Stop(name) for name in sorted(self._pending)]

    def _ended(self, now: float, instance_id: str) -> list[Effect]:
        self._pending.discard(instance_id)
        return [] if self._pending else self._begin_launch(now)

    # --- launches ------------------------------------------------------------------------------

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

    def _up(self, now: float, instance_id: str) -> list[Effect]:
        slot = self._queue.pop(0)
        self.capacity.join(now, instance_id or f"attempt {self._attempt}", slot)
        if self._queue:
            self._n_tries = 0
            return self._launch(now)
        if self.phase == "undoing":
            return self._end("given_up")
        return self._next_step(now)

    def _failed(self, now: float, reason: str) -> list[Effect]:
        if self._n_tries < self._patience.n_launches:
            return self._launch(now)
        self._n_tries = 0
        self._tried.add(self._queue[0])
        if self._go_elsewhere():
            return self._launch(now)
        if self.phase == "undoing":
            self.reason = f"{self.reason}; nor could {_text(self._queue[0])} be launched again"
            self._queue.pop(0)
        else:
            assert self._step is not None
            self.phase, self.reason = "undoing", reason
            self._queue = [self._slots[name] for name in self._step.terminate]
        return self._launch(now) if self._queue else self._end("given_up")

    def _go_elsewhere(self) -> bool:
        """Put the first of the queue into another place, if there is one; who was to come there
        later comes here."""
        failed = self._queue[0]
        later = [*self._queue[1:], *(step.launch for step in self._steps if step.launch)]
        taken = [*self.capacity.slots(), *self._tried]
        found = other_slot(failed, self._nodes, taken, later)
        if found is None:
            return False
        self._queue = [found, *(failed if slot == found else slot for slot in self._queue[1:])]
        for number, step in enumerate(self._steps):
            if step.launch == found:
                swapped = Step(terminate=step.terminate, launch=failed, n_serving=step.n_serving)
                self._steps[number] = swapped
        return True

    def _end(self, phase: Phase) -> list[Effect]:
        self.phase, self._deadline_s = phase, None
        return []


def _text(slot: Slot) -> str:
    return f"TP-{slot.tp_degree} on node {slot.node}, GPU {', '.join(map(str, slot.gpus))}"
