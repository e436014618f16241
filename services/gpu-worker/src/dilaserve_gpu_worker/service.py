"""The worker's loop: commands → records → passes → commits → reports (DESIGN sections 3 and 4).

Commit first, then emit; at most one pass runs ahead of an unanswered commit. The engine runs
elsewhere, and begins a pass that it may run without asking. Knows no tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dilaserve import __version__, subjects
from dilaserve.bus import Bus, BusMessage, ServiceCard
from dilaserve.crashpoints import CrashPoints
from dilaserve.messages import (
    CommitOutcome,
    InstanceInfo,
    StepCommand,
    StopCommand,
    decode_to_worker,
)
from dilaserve.store import Store
from dilaserve.store.records import RequestRecord
from dilaserve.telemetry import Telemetry
from dilaserve_gpu_worker.commits import Committer
from dilaserve_gpu_worker.engine.types import BatchOutput, EngineLostError
from dilaserve_gpu_worker.holdings import Holdings, Unanswered
from dilaserve_gpu_worker.host.port import EnginePort
from dilaserve_gpu_worker.observe import RequestTraces, WorkerMetrics
from dilaserve_gpu_worker.patience import Patience
from dilaserve_gpu_worker.reports import Reports

__all__ = ["WorkerService"]

log = logging.getLogger(__name__)

N_AHEAD = 2
"""Passes that may begin before the first of them is answered for: it, and one ahead."""


class WorkerService:
    """One instance: serves until it is stopped."""

    def __init__(
        self,
        engine: EnginePort,
        bus: Bus,
        store: Store,
        info: InstanceInfo,
        *,
        telemetry: Telemetry,
        clock: Callable[[], float],
        crash: CrashPoints | None = None,
        heartbeat_s: float = 0.25,
        stop_timeout_s: float = 5.0,
    ) -> None:
        self._engine = engine
        self._bus = bus
        self._store = store
        self._info = info
        self._address = telemetry.address
        self._heartbeat_s = heartbeat_s
        self._stop_timeout_s = stop_timeout_s
        self._crash = crash or CrashPoints()
        self._wake = asyncio.Event()
        self._for_loads = Patience()
        self._for_commits = Patience()
        self._stop_reason: str | None = None
        self._error: EngineLostError | None = None
        self._commands: deque[StepCommand] = deque()
        self._applied = (0, 0)
        self._batch = 0
        self._settling: asyncio.Task[None] | None = None
        self._unanswered: Sequence[Unanswered] = ()
        self._metrics = WorkerMetrics(telemetry, info)
        self._reports = Reports(bus, info, self._metrics)
        self._holdings = Holdings(
            engine,
            instance_id=info.instance_id,
            model_id=info.model_id,
            traces=RequestTraces(telemetry.tracer, info.instance_id),
        )
        self._committer = Committer(
            store,
            info=info,
            metrics=self._metrics,
            clock=clock,
            patience=self._for_commits,
        )
        self._metrics.gauges(lambda: len(self._holdings), lambda: engine.n_free_kv_tokens)

    async def run(self) -> None:
        """Join, serve until `stop`, leave. A part that fails ends the whole. Raises
        EngineLostError, after leaving, when the engine was lost."""
        self._engine.on_report(self._wake.set)
        listening = [
            await self._bus.subscribe(subjects.command_step(self._info.instance_id), self._receive),
            await self._bus.subscribe(subjects.command_stop(self._info.instance_id), self._receive),
            await self._bus.serve(self._card(), []),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                heart = tasks.create_task(self._beat())
                await self._serve(tasks)
                heart.cancel()
            for subscription in listening:
                await subscription.unsubscribe()
            await self._reports.down(self._stop_reason or "")
        finally:
            self._holdings.close()
        if self._error is not None:
            raise self._error

    def stop(self, reason: str) -> None:
        """End `run` after the pass in flight and its commit, or after `stop_timeout_s`."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._for_loads.end()
            asyncio.get_running_loop().call_later(self._stop_timeout_s, self._give_up)
            self._wake.set()

    def _give_up(self) -> None:
        """Leave behind what does not end: a commit without an answer, a pass, an engine."""
        self._for_commits.end()
        self._wake.set()

    # --- the loop ------------------------------------------------------------------------------

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        await self._reports.up()
        for _ in range(N_AHEAD):
            self._engine.allow()
        while self._stop_reason is None:
            self._wake.clear()
            await self._catch_up()
            if not await self._commit_next(tasks):
                await self._wake.wait()
        await self._finish(tasks)

    async def _finish(self, tasks: asyncio.TaskGroup) -> None:
        """Commit what still comes, until no more does or time is up."""
        self._engine.end()
        while True:
            self._wake.clear()
            if await self._commit_next(tasks):
                continue
            if self._engine.has_ended or self._for_commits.has_ended:
                break
            await self._wake.wait()
        await self._settled()

    async def _catch_up(self) -> None:
        """Apply commands, load what is wanted, free what ended."""
        applied = self._applied
        while self._commands:
            command = self._commands.popleft()
            if (command.term, command.seq) <= applied:
                self._metrics.dropped("stale")
                continue
            applied = (command.term, command.seq)
            self._holdings.apply(command)
        if self._holdings.wanted:
            await self._load()
        self._holdings.sweep()
        # Said only now: whoever reads it in a heartbeat must find the requests in it, too.
        self._applied = applied

    async def _load(self) -> None:
        wanted = self._holdings.wanted
        if any(holding.request_id in wanted for holding, _ in self._unanswered):
            # Only after the answer is it known which canvas is the committed one.
            await self._settled()
        items = list(wanted.values())
        loaded = await self._for_loads.until_answered(
            lambda: _load_requests(self._store, [item.request_id for item in items]),
            what=f"load of {len(items)} requests",
        )
        if loaded is None:
            return
        rejected = [
            refusal
            for item, (record, confidences) in zip(items, loaded, strict=True)
            if (refusal := self._holdings.take(item, record, confidences))
        ]
        if rejected:
            await self._reports.rejected(self._batch, rejected)

    async def _commit_next(self, tasks: asyncio.TaskGroup) -> bool:
        """Begin to commit the next pass, after the answers to the one before; False if none has
        ended."""
        try:
            output = self._engine.take()
        except EngineLostError as error:
            self._fail(error)
            return False
        if output is None:
            return False
        self._batch += 1
        await self._settled()
        self._unanswered = self._holdings.unanswered(output.steps)
        self._metrics.pass_done(output, [holding.trace for holding, _ in self._unanswered])
        self._settling = tasks.create_task(self._settle(self._batch, output, self._unanswered))
        return True

    def _fail(self, error: EngineLostError) -> None:
        """Leave at once, so that what is held goes on elsewhere."""
        if self._error is None:
            self._error = error
            self.stop(str(error))

    async def _settled(self) -> None:
        if self._settling is not None:
            await self._settling
        self._settling = None
        self._unanswered = ()

    async def _settle(self, batch: int, output: BatchOutput, steps: Sequence[Unanswered]) -> None:
        outcomes = await self._committer.commit(steps, output.latency_s * 1000)
        if outcomes is None:
            log.warning("stopped before the store answered %d commits", len(steps))
            return
        if steps:
            self._crash.reach("worker.after_commit")
        await self._emit(steps, outcomes)
        self._holdings.sweep()
        self._engine.allow()
        await self._reports.step(batch, output, steps, outcomes)
        self._wake.set()

    async def _emit(self, steps: Sequence[Unanswered], outcomes: Sequence[CommitOutcome]) -> None:
        stored = []
        for (holding, output), outcome in zip(steps, outcomes, strict=True):
            if outcome not in ("committed", "duplicate"):
                self._holdings.forget(holding, outcome)
                continue
            stored.append(output)
            self._holdings.committed(holding, output)
            if output.finish_reason is not None:
                self._holdings.forget(holding, "finished")
            await self._reports.tokens(holding, output)
        self._metrics.committed(stored)

    # --- beside the loop -----------------------------------------------------------------------

    def _receive(self, message: BusMessage) -> None:
        try:
            command = decode_to_worker(message.data)
        except msgspec.DecodeError as error:
            log.warning("dropped a message on %s: %s", message.subject, error)
            self._metrics.dropped("invalid")
            return
        match command:
            case StepCommand():
                self._crash.reach("worker.command_in_flight")
                self._commands.append(command)
                self._wake.set()
            case StopCommand():
                self.stop(command.reason or "stop command")

    async def _beat(self) -> None:
        """As long as the engine's process runs, too: without it nothing goes on here."""
        was_there = True
        while True:
            is_there = self._engine.ping()
            if is_there:
                await self._reports.heartbeat(
                    applied=self._applied,
                    n_free_kv_tokens=self._engine.n_free_kv_tokens,
                    holds=self._holdings.report(),
                )
            if is_there != was_there:
                words = "is back" if is_there else "does not answer, or another rank's"
                log.warning("the engine's process %s", words)
            was_there = is_there
            await asyncio.sleep(self._heartbeat_s)

    def _card(self) -> ServiceCard:
        return ServiceCard(
            name="gpu-worker",
            version=__version__,
            description="denoises canvases of masked tokens, step by step",
            metadata={
                "id": self._info.instance_id,
                "pid": str(self._info.pid),
                "address": self._address,
                "host": self._info.host,
            },
        )


async def _load_requests(
    store: Store, request_ids: Sequence[str]
) -> list[tuple[RequestRecord | None, dict[int, float]]]:
    """Records in the order asked, each with the confidences of its tokens by position."""
    records = await store.load(request_ids)
    confidences = await asyncio.gather(*[_confidences(store, record) for record in records])
    return list(zip(records, confidences, strict=True))


async def _confidences(store: Store, record: RequestRecord | None) -> dict[int, float]:
    if record is None or record.step == 0:
        return {}
    deltas = await store.deltas(record.request.request_id)
    return {
        position: confidence
        for delta in deltas
        if delta.step <= record.step
        for position, confidence in zip(delta.positions, delta.confidences, strict=False)
    }
