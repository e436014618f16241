"""A virtual instance: the loop of the worker (command → pass → commit → report), on virtual time.

What it holds is kept by the worker's own Holdings. The store takes a commit at the moment when the
pass ends; the report leaves `store_s` later, when the answer would be there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from opentelemetry.trace import NoOpTracer

from dilaserve.messages import (
    Heartbeat,
    InstanceDown,
    InstanceInfo,
    InstanceUp,
    Rejected,
    StepCommand,
    StepItem,
    StepItemResult,
    StepResult,
    WorkerEvent,
)
from dilaserve.store.records import RequestRecord
from dilaserve_bench.twin.engine import VirtualEngine, VirtualPlan
from dilaserve_bench.twin.store import TwinStore
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_gpu_worker.engine.types import StepOutput
from dilaserve_gpu_worker.holdings import Holdings, Unanswered
from dilaserve_gpu_worker.observe import RequestTraces
from dilaserve_gpu_worker.reports import item_result

__all__ = ["PassObserver", "VirtualWorker"]


class PassObserver(Protocol):
    """Whoever measures."""

    def passed(
        self, worker: VirtualWorker, seconds: float, plan: VirtualPlan, steps: list[StepOutput]
    ) -> None:
        """A pass has ended, and the store has these steps of it."""
        ...


class VirtualWorker:
    """One incarnation of an instance. `pass_s` gives the seconds of a pass; `send`
    delivers an event to the scheduler, a given time from now."""

    def __init__(
        self,
        info: InstanceInfo,
        engine: VirtualEngine,
        *,
        timeline: Timeline,
        store: TwinStore,
        send: Callable[[WorkerEvent, float], None],
        observer: PassObserver,
        pass_s: Callable[[VirtualPlan], float],
        store_s: float,
        heartbeat_s: float,
        lock_step: bool = False,
    ) -> None:
        self.info = info
        self.is_alive = True
        self.started_at = timeline.now
        self.busy_s = 0.0
        """Time spent in passes that have ended."""
        self._engine = engine
        self._timeline = timeline
        self._store = store
        self._send = send
        self._observer = observer
        self._pass_s = pass_s
        self._store_s = store_s
        self._heartbeat_s = heartbeat_s
        self._lock_step = lock_step
        self._holdings = Holdings(
            engine,
            instance_id=info.instance_id,
            model_id=info.model_id,
            traces=RequestTraces(NoOpTracer(), info.instance_id),
        )
        self._commands: deque[StepCommand] = deque()
        self._applied = self._applying = (0, 0)
        self._is_idle = True
        self._is_leaving = False
        self._gone: Callable[[], None] | None = None
        self._batch = 0
        self._n_free_kv_tokens = engine.n_free_kv_tokens

    # --- its life ------------------------------------------------------------------------------

    def start(self, first_beat_s: float) -> None:
        """Join; the first heartbeat comes `first_beat_s` later."""
        self._send(InstanceUp(info=self.info), 0.0)
        self._timeline.after(first_beat_s, self._beat)

    def kill(self) -> None:
        """Die, with the pass in flight."""
        self.is_alive = False
        self._engine.close()

    def leave(self, gone: Callable[[], None] | None = None) -> None:
        """Stop after the pass in flight, and say so; `gone` is called then."""
        self._is_leaving = True
        self._gone = gone
        if self._is_idle:
            self._turn()

    def receive(self, command: StepCommand) -> None:
        """A command arrives: applied at once, or when the pass in flight has ended."""
        self._commands.append(command)
        if self._is_idle:
            self._turn()

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Between two passes."""
        if self._is_leaving:
            self._depart()
            return
        self._is_idle = False
        if self._commands:
            self._catch_up()
        if self._holdings.wanted:
            self._timeline.after(self._store_s, self._load)
        else:
            self._begin_pass()

    def _depart(self) -> None:
        self._send(InstanceDown(instance_id=self.info.instance_id, reason="asked to"), 0.0)
        self.kill()
        if self._gone is not None:
            self._gone()

    def _catch_up(self) -> None:
        applied = self._applied
        while self._commands:
            command = self._commands.popleft()
            if (command.term, command.seq) > applied:
                applied = (command.term, command.seq)
                self._holdings.apply(command)
        self._applying = applied

    def _load(self, _: None) -> None:
        if not self.is_alive:
            return
        items = list(self._holdings.wanted.values())
        records = self._store.load([item.request_id for item in items])
        rejected = [
            refusal
            for item, record in zip(items, records, strict=True)
            if (refusal := self._take(item, record))
        ]
        if rejected:
            self._refuse(rejected)
        self._begin_pass()

    def _take(self, item: StepItem, record: RequestRecord | None) -> Rejected | None:
        return self._holdings.take(item, record, self._store.confidences(item.request_id))

    def _refuse(self, rejected: list[Rejected]) -> None:
        result = StepResult(
            instance_id=self.info.instance_id,
            batch=self._batch,
            latency_ms=0.0,
            n_tokens=0,
            rejected=rejected,
        )
        self._send(result, 0.0)

    def _begin_pass(self) -> None:
        self._holdings.sweep()
        # Said only now: whoever reads it in a heartbeat must find the requests in it, too.
        self._applied = self._applying
        self._n_free_kv_tokens = self._engine.n_free_kv_tokens
        waits = self._lock_step and not self._engine.all_may_run()
        plan = None if waits else self._engine.plan()
        if plan is not None:
            seconds = self._pass_s(plan)
            self._timeline.after(seconds, self._end_pass, (plan, seconds))
        elif self._commands or self._is_leaving:
            self._turn()
        else:
            self._is_idle = True

    def _end_pass(self, passed: tuple[VirtualPlan, float]) -> None:
        if not self.is_alive:
            return
        plan, seconds = passed
        self._batch += 1
        self.busy_s += seconds
        outputs = self._engine.unmask(plan)
        stored: list[StepOutput] = []
        items = [self._settle(step, stored) for step in self._holdings.unanswered(outputs)]
        self._observer.passed(self, seconds, plan, stored)
        result = StepResult(
            instance_id=self.info.instance_id,
            batch=self._batch,
            latency_ms=seconds * 1000,
            n_tokens=plan.n_tokens,
            n_rebuilds=plan.n_rebuilds,
            items=items,
        )
        self._send(result, self._store_s if items else 0.0)
        self._turn()

    def _settle(self, step: Unanswered, stored: list[StepOutput]) -> StepItemResult:
        """Commit a step, and draw the conclusions."""
        holding, output = step
        outcome = self._store.commit(holding.epoch, output)
        if outcome == "committed":
            stored.append(output)
            self._engine.committed(output.request_id)
            self._holdings.committed(holding, output)
            if output.finish_reason is not None:
                self._holdings.forget(holding, "finished")
        else:
            self._holdings.forget(holding, outcome)
        return item_result(holding, output, outcome)

    # --- beside the loop -----------------------------------------------------------------------

    def _beat(self, _: None) -> None:
        if not self.is_alive:
            return
        term, seq = self._applied
        heartbeat = Heartbeat(
            info=self.info,
            term=term,
            seq=seq,
            n_free_kv_tokens=self._n_free_kv_tokens,
            holds=self._holdings.report(),
        )
        self._send(heartbeat, 0.0)
        self._timeline.after(self._heartbeat_s, self._beat)
