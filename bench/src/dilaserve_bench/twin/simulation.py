"""One run: a workload through the production core over a virtual cluster. Composes the parts.

Deterministic: the same scenario and seed give the same run, whatever the machine. Knows no wall
clock but the one it is given to say how fast it ran.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dilaserve.messages import Admitted, Cancelled, Refused, Submit, WorkerEvent
from dilaserve.plan_messages import Drained, NotDrained
from dilaserve.profiles import ProfileSet
from dilaserve_bench.twin.clients import Clients, Judge, Served
from dilaserve_bench.twin.cluster import Cluster, ClusterSpec
from dilaserve_bench.twin.configurations import Configuration, PlanNote
from dilaserve_bench.twin.faults import Fault
from dilaserve_bench.twin.hands import Hands, VirtualHands
from dilaserve_bench.twin.measure import Gaps, Measurements
from dilaserve_bench.twin.prices import PassSeconds, profiled_seconds
from dilaserve_bench.twin.scheduler import Adviser, CoreCalls, VirtualScheduler
from dilaserve_bench.twin.source import StepSource
from dilaserve_bench.twin.store import TwinStore
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.workload import Workload
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import Reassign, Send
from dilaserve_scheduler.core.policy import Policy

if TYPE_CHECKING:
    from dilaserve_bench.twin.replanning import Replanner

__all__ = ["Replan", "Run", "Scenario", "Simulation"]

N_SLOTS = 60
N_YOUNG = 50_000
"""New objects after which the garbage collector looks for cycles among them."""

Replan = Callable[[Sequence[int], Timeline, Hands], "Replanner"]
"""A planner for instances of these TP degrees, by number."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything but the workload. What is not data makes a fresh object for every run."""

    cluster: ClusterSpec
    profiles: ProfileSet | None
    """Latencies of passes; None where `pass_seconds` tells them."""
    pass_seconds: PassSeconds | None = None
    policy: Callable[[], Policy]
    source: Callable[[Workload], StepSource]
    judge: Judge | None = None
    core: CoreSettings = field(default_factory=CoreSettings)
    faults: Sequence[Fault] = ()
    ignore_eos: bool = True
    adviser: Callable[[Workload], Adviser] | None = None
    advice_s: float = 0.002
    """From a policy's question to the answer."""
    replan: Replan | None = None
    """None: instances stay what they are."""
    horizon_s: float = float("inf")
    """Virtual time at which a run is broken off."""
    slot_s: float | None = None
    """Resolution of what is measured over time; None: a 60th of the arrivals, at least 1 s."""
    time_gaps: bool = False
    """Whether to keep how long every cache step let its request wait."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left behind."""

    seed: int
    served: list[Served]
    measured: Measurements
    utilisation: float
    virtual_s: float
    n_events: int
    wall_s: float
    core_calls: CoreCalls
    """Empty where the core was not timed."""
    is_complete: bool
    """False if it was broken off."""
    configurations: Sequence[Configuration] = ()
    """Empty where there is no planner."""
    plans: Sequence[PlanNote] = ()


class Simulation:
    """One run. `timer` counts seconds of the machine that runs it; with `time_core` it is also
    read twice for each call of the core."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        seed: int,
        *,
        timer: Callable[[], float],
        time_core: bool = False,
    ) -> None:
        spec = scenario.cluster
        self._scenario = scenario
        self._seed = seed
        self._timer = timer
        self._source = scenario.source(workload)
        self.timeline = Timeline()
        slot_s = scenario.slot_s or max(workload[-1].at_s / N_SLOTS, 1.0)
        gaps = Gaps() if scenario.time_gaps else None
        self.measured = Measurements(self.timeline, slot_s=slot_s, gaps=gaps)
        self.store = TwinStore(ended=lambda record: self.clients.ended(record))
        self.scheduler = VirtualScheduler(
            scenario.policy,
            scenario.core,
            timeline=self.timeline,
            store=self.store,
            outside=self,
            bus_s=spec.bus_s,
            store_s=spec.store_s,
            adviser=scenario.adviser(workload) if scenario.adviser is not None else None,
            advice_s=scenario.advice_s,
            timer=timer if time_core else None,
        )
        self.cluster = Cluster(
            spec,
            self._source,
            pass_seconds=_pass_seconds(scenario),
            timeline=self.timeline,
            store=self.store,
            send=self.scheduler.send if scenario.replan is None else self._heard,
            observer=self.measured,
        )
        self.clients = self._gather(workload)
        self.replanner: Replanner | None = None
        if scenario.replan is not None:
            self._hands = VirtualHands(
                self.cluster, timeline=self.timeline, send=self.scheduler.send
            )
            self.replanner = scenario.replan(spec.degrees, self.timeline, self._hands)

    def run(self, interrupted: Callable[[], bool] = lambda: False) -> Run:
        """Until every request has ended, no instance is left or comes back, or `interrupted()`
        when it is asked."""
        started = self._timer()
        self.scheduler.start()
        self.cluster.start_all()
        self.clients.start()
        if self.replanner is not None:
            self.replanner.start()
        for fault in self._scenario.faults:
            self.timeline.at(fault.at_s, self._happen, fault)
        with _rare_collections():
            self.timeline.run(
                horizon_s=self._scenario.horizon_s,
                interrupted=lambda: interrupted() or self._is_gone(),
            )
        planner = self.replanner
        return Run(
            seed=self._seed,
            served=list(self.clients.served.values()),
            measured=self.measured,
            utilisation=self.cluster.utilisation(),
            virtual_s=self.timeline.now,
            n_events=self.timeline.n_events,
            wall_s=self._timer() - started,
            core_calls=self.scheduler.calls,
            is_complete=self.clients.all_ended(),
            configurations=planner.gpus.course if planner is not None else (),
            plans=planner.notes() if planner is not None else (),
        )

    def _gather(self, workload: Workload) -> Clients:
        scenario, spec = self._scenario, self._scenario.cluster
        return Clients(
            workload,
            timeline=self.timeline,
            store=self.store,
            submit=self.scheduler.send if scenario.replan is None else self._submitted,
            block_length=spec.block_length,
            ignore_eos=scenario.ignore_eos,
            tell_s=spec.store_s + spec.bus_s,
            judge=scenario.judge,
        )

    # --- what the scheduler sends (scheduler.Outside) ------------------------------------------

    def command(self, sent: Send) -> None:
        """A command arrives at an instance."""
        self.cluster.command(sent)

    def reply(self, answer: Admitted | Refused | Cancelled) -> None:
        """An answer arrives at a gateway."""
        self.clients.reply(answer)

    def drained(self, answer: Drained | NotDrained) -> None:
        """An answer arrives at the planner."""
        self._hands.answered(answer)

    def moving(self, call: Reassign) -> None:
        """A request is to change its owner."""
        self.measured.moving(call)

    # --- what the planner hears ----------------------------------------------------------------

    def _heard(self, event: WorkerEvent, delay_s: float) -> None:
        assert self.replanner is not None
        self.replanner.heard(event)
        self.scheduler.send(event, delay_s)

    def _submitted(self, submit: Submit) -> None:
        assert self.replanner is not None
        self.replanner.submitted(submit)
        self.scheduler.send(submit)

    # --- what goes wrong -----------------------------------------------------------------------

    def _is_gone(self) -> bool:
        is_changing = self.replanner is not None and self.replanner.is_busy
        return self.cluster.is_gone() and not is_changing

    def _lose(self, fault: Fault) -> None:
        if self.replanner is not None and fault.for_s is None:
            self.replanner.died(fault.instance)

    def _happen(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                self.cluster.kill(fault.instance, fault.for_s)
                self._lose(fault)
            case "leave":
                self.cluster.leave(fault.instance, fault.for_s)
                self._lose(fault)
            case "pause":
                self.scheduler.pause(fault.for_s or 0.0)
            case "restart":
                self.scheduler.crash(fault.for_s or 0.0)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes many objects and hardly any cycles, so that looking for these is mostly vain."""
    before = gc.get_threshold()
    gc.set_threshold(N_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _pass_seconds(scenario: Scenario) -> PassSeconds:
    if scenario.pass_seconds is not None:
        return scenario.pass_seconds
    if scenario.profiles is None:
        raise ValueError("a scenario needs profiles or pass_seconds")
    spec = scenario.cluster
    return profiled_seconds(
        scenario.profiles,
        lookup=spec.lookup,
        overhead=spec.overhead,
        max_batch_tokens=spec.max_batch_tokens,
    )
