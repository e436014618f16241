"""The planner on virtual time: the production monitor, planner, route and execution drive virtual
instances. Decides nothing itself; knows neither the scheduler nor what an instance does.

A plan takes `plan_s` to make. The next one is made `every_s` later, or when the last one has been
carried out, if that takes longer. In between what is wanted is kept: an instance that dies is
replaced, a plan that is given up is undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dilaserve.messages import Heartbeat, Submit, WorkerEvent
from dilaserve_bench.twin.configurations import PlanNote
from dilaserve_bench.twin.gpus import Gpus
from dilaserve_bench.twin.hands import Hands
from dilaserve_bench.twin.starting import StartUp
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_reconfigurator.execution import (
    Abort,
    Drain,
    Drained,
    Effect,
    Ended,
    Event,
    Execution,
    Failed,
    Launch,
    Lost,
    Patience,
    Resume,
    Stop,
    Up,
)
from dilaserve_reconfigurator.monitor import Monitor
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.record import PlanRecord
from dilaserve_reconfigurator.route import find_route
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.stage2 import Placed, Transition, build_model, read_plan

__all__ = ["ReplanSpec", "Replanner"]

KEEP_S = 1.0
"""After which it is looked whether all instances run that are wanted."""
RETRY_S = 30.0
"""After what could not be brought about."""
LATE_S = 5.0
"""By which a launch may be late, besides ten times what it takes."""
MOVES_S = 3600.0
"""For the way from one mix to another: never reached, like `ReplanSpec.planner.budget_s`."""


@dataclass(frozen=True, kw_only=True)
class ReplanSpec:
    """How the planner plans, and what its plans take. `planner.budget_s` has to be so long that it
    never ends a search, or runs would depend on the machine."""

    planner: PlannerOptions
    nodes: tuple[int, ...]
    every_s: float = 300.0
    window_s: float = 300.0
    plan_s: float = 2.0
    start_up: StartUp = field(default_factory=StartUp)
    floor: int = 0
    """GPUs that are to serve all the time, where there is a way."""
    slo_s: float = 30.0
    """Of requests that bring none."""


class Replanner:
    """`degrees` are those of the instances that run at the start, by their numbers."""

    def __init__(
        self, spec: ReplanSpec, degrees: Sequence[int], timeline: Timeline, hands: Hands
    ) -> None:
        numbers = count(1)
        self.records: list[PlanRecord] = []
        """All plans, in order."""
        self.gpus = Gpus(spec.nodes)
        self._spec = spec
        self._timeline = timeline
        self._hands = hands
        self._planner = Planner(spec.planner, lambda: f"plan-{next(numbers)}")
        self._monitor = Monitor(window_s=spec.window_s, slo_s=spec.slo_s)
        self._execution: Execution | None = None
        self._record: PlanRecord | None = None
        self._is_overdue = False
        self._wanted: Mapping[int, int] = Counter(degrees)
        self._before: Mapping[int, int] = self._wanted
        """What to go back to when a plan is given up."""
        self._numbers: dict[int, int] = {}
        """Of the instances that were launched, by attempt."""
        self._ending: set[str] = set()
        self._settle(degrees)

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being carried out."""
        return self._execution is not None

    def notes(self) -> list[PlanNote]:
        """All plans, in brief."""
        return [_note(record) for record in self.records]

    def start(self) -> None:
        """The first plan comes after an interval."""
        self._timeline.after(self._spec.every_s, self._due)

    def submitted(self, submit: Submit) -> None:
        """A client has asked for something."""
        slo_s = None if submit.slo_ms is None else submit.slo_ms / 1000
        now, n_prompt, n_output = self._timeline.now, submit.n_prompt, submit.n_output
        self._monitor.arrived(now, submit.request_id, n_prompt, n_output, slo_s)

    def heard(self, event: WorkerEvent) -> None:
        """An instance has said something."""
        if isinstance(event, Heartbeat):
            self._monitor.alive(self._timeline.now)

    def died(self, number: int) -> None:
        """An instance is gone for good, and nobody asked it to."""
        name = _name(number)
        if any(placed.instance_id == name for placed in self.gpus.serving()):
            self.gpus.free(self._timeline.now, name)
            self._happened(Lost(name))
            self._timeline.after(KEEP_S, self._keep)

    # --- plans ---------------------------------------------------------------------------------

    def _due(self, _: None) -> None:
        if self.is_busy:
            self._is_overdue = True
            return
        self._timeline.after(self._spec.every_s, self._due)
        now = self._timeline.now
        cluster = Cluster(self._spec.nodes, self.gpus.serving())
        record = self._planner.plan(now, self._monitor.workload(now), cluster)
        self.records.append(record)
        if record.verdict == "change":
            self._timeline.after(self._spec.plan_s, self._apply, (record, cluster.running))

    def _apply(self, planned: tuple[PlanRecord, Sequence[Placed]]) -> None:
        record, running = planned
        if self.is_busy or self.gpus.serving() != running:  # an instance has died since
            return
        assert record.transition is not None
        self._record = record
        self._before, self._wanted = self._wanted, _positive(record.target.counts)
        self._execute(record.transition)

    def _keep(self, _: None) -> None:
        running = self.gpus.serving()
        degrees = Counter(placed.slot.tp_degree for placed in running)
        if not self.is_busy and degrees != self._wanted:
            self._execute(self._way(running, {**dict.fromkeys(degrees, 0), **self._wanted}))

    def _way(self, running: Sequence[Placed], wanted: Mapping[int, int]) -> Transition:
        model = build_model(self._spec.nodes, running, wanted)
        solve(model, MOVES_S)
        return read_plan(model)

    def _execute(self, transition: Transition) -> None:
        running, spec = self.gpus.serving(), self._spec
        route = find_route(transition, running)
        self._execution = Execution(
            route, running, self._patience, nodes=spec.nodes, floor=spec.floor
        )
        self._carry_out(self._execution.start(self._timeline.now))

    @property
    def _patience(self) -> Patience:
        return Patience(launch_s=LATE_S + 10 * self._spec.start_up.seconds)

    def _happened(self, event: Event) -> None:
        if self._execution is not None:
            self._carry_out(self._execution.handle(self._timeline.now, event))

    def _tick(self, execution: Execution) -> None:
        if execution is self._execution:
            self._carry_out(execution.tick(self._timeline.now))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._do(effect)
        execution = self._execution
        if execution is None:
            return
        if execution.is_over:
            self._over(execution)
        elif (wake_at := execution.wake_at()) is not None:
            self._timeline.at(max(wake_at, self._timeline.now), self._tick, execution)

    def _over(self, execution: Execution) -> None:
        if execution.phase == "done" and self._record is not None:
            self._planner.changed(self._timeline.now, self._record)
        if execution.phase == "given_up":
            self._wanted = self._before
        self._execution = self._record = None
        self._hands.settle()
        self._timeline.after(KEEP_S if execution.phase == "done" else RETRY_S, self._keep)
        if self._is_overdue:
            self._is_overdue = False
            self._due(None)

    # --- what they do to the cluster -----------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        match effect:
            case Drain():
                name = effect.instance_id
                self._hands.drain(_number(name), lambda: self._happened(Drained(name)))
            case Resume():
                self._hands.resume(_number(effect.instance_id))
            case Stop():
                self._stop(effect.instance_id)
            case Launch():
                self._launch(effect)
            case Abort():
                self._abort(effect.attempt)

    def _stop(self, name: str) -> None:
        if name not in self._ending:  # an execution asks again when it has waited long
            self._ending.add(name)
            self.gpus.leave(self._timeline.now, name)
            self._hands.end(_number(name), lambda: self._ended(name))

    def _ended(self, name: str) -> None:
        self.gpus.free(self._timeline.now, name)
        self._happened(Ended(name))

    def _launch(self, wanted: Launch) -> None:
        number = self._hands.launch(
            wanted.slot.tp_degree,
            self._spec.start_up.seconds,
            lambda: self._up(number, wanted.attempt),
        )
        self._numbers[wanted.attempt] = number
        self.gpus.take(self._timeline.now, _name(number), wanted.slot)

    def _up(self, number: int, attempt: int) -> None:
        self._hands.settle()
        self.gpus.serve(self._timeline.now, _name(number))
        self._happened(Up(attempt, _name(number)))

    def _abort(self, attempt: int) -> None:
        number = self._numbers[attempt]
        name = _name(number)
        if name not in self._ending:
            self._ending.add(name)
            self._hands.end(number, lambda: self._aborted(name, attempt))

    def _aborted(self, name: str, attempt: int) -> None:
        self.gpus.free(self._timeline.now, name)
        self._happened(Failed(attempt, f"{name} was late"))

    def _settle(self, degrees: Sequence[int]) -> None:
        """Where the first instances are: numbers of a degree take its places in order. Raises
        PlanningError if the nodes have no room for them."""
        counts = {degree: list(degrees).count(degree) for degree in sorted(set(degrees))}
        places = [placed.slot for placed in place(self._spec.nodes, counts)]
        for number, degree in enumerate(degrees):
            slot = next(slot for slot in places if slot.tp_degree == degree)
            places.remove(slot)
            self.gpus.take(self._timeline.now, _name(number), slot, serves=True)


def _note(record: PlanRecord) -> PlanNote:
    classes = record.inputs.classes if record.inputs is not None else []
    return PlanNote(
        at_s=record.made_at_s,
        verdict=record.verdict,
        reason="; ".join(record.reasons),
        rate=round(sum(each.rate for each in classes), 4),
        present={d: n for d, n in sorted(record.present.counts.items()) if n},
        target={d: n for d, n in sorted(record.target.counts.items()) if n},
    )


def _positive(counts: Mapping[int, int]) -> Mapping[int, int]:
    return Counter({degree: n for degree, n in counts.items() if n})


def _name(number: int) -> str:
    """As the virtual cluster names its instances."""
    return f"i{number}"


def _number(name: str) -> int:
    return int(name.removeprefix("i"))
