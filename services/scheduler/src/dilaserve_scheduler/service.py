"""The scheduler's process around its core: messages and store answers in, effects out.

One loop feeds the core, so nothing here needs a lock. Knows no policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dilaserve import __version__, subjects
from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import BusUnavailableError, StoreUnavailableError
from dilaserve.messages import Heartbeat, InstanceUp, Submit, decode_worker_event, encode
from dilaserve.process import Identity
from dilaserve.store import Store
from dilaserve.store.records import RequestRecord
from dilaserve.telemetry import Telemetry
from dilaserve_scheduler.core import Core
from dilaserve_scheduler.core.effects import (
    Admit,
    AnswerDrain,
    Ask,
    Effect,
    Ended,
    Fail,
    ListActive,
    Load,
    Log,
    RaiseTerm,
    Reassign,
    Reply,
    Send,
)
from dilaserve_scheduler.core.events import (
    AdmitAnswered,
    Event,
    ReassignAnswered,
    Recovered,
    StoredRequest,
    StoreRestarted,
    TermRaised,
)
from dilaserve_scheduler.lease import Lease, LeaseLostError
from dilaserve_scheduler.observe import SchedulerMetrics
from dilaserve_scheduler.predicting import PredictorCalls
from dilaserve_scheduler.profile_notes import ProfileNotes
from dilaserve_scheduler.records import to_stored
from dilaserve_scheduler.replies import Desk
from dilaserve_scheduler.storing import StoreCalls
from dilaserve_scheduler.tracing import PlacementTraces

__all__ = ["Clocks", "SchedulerService"]

WATCH_EVERY_S = 1.0
"""How often the store's run id is read, and the gauges are refreshed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds from anywhere, seconds since the epoch, and seconds for durations."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    precise: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Calls:
    """Those whose answers come as events."""

    store: StoreCalls
    predictor: PredictorCalls


class SchedulerService:
    """Stands by until the lease is free, then decides until it is stopped or loses the lease."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        identity: Identity,
        *,
        build_core: Callable[[int], Core],
        telemetry: Telemetry,
        clocks: Clocks,
        crash: CrashPoints | None = None,
        notes: ProfileNotes | None = None,
        lease_ttl_s: float = 2.0,
        submit_timeout_s: float = 10.0,
    ) -> None:
        self._bus = bus
        self._store = store
        self._identity = identity
        self._build_core = build_core
        self._address = telemetry.address
        self._clocks = clocks
        self._crash = crash or CrashPoints()
        self._notes = notes or ProfileNotes(None)
        self._lease = Lease(store, holder=identity.service_id, ttl_s=lease_ttl_s)
        self._metrics = SchedulerMetrics(telemetry)
        self._traces = PlacementTraces(telemetry.tracer)
        self._desk = Desk(self._submitted, self._put, self._metrics, timeout_s=submit_timeout_s)
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`. Raises LeaseLostError when another scheduler has taken over."""
        card = await self._bus.serve(self._card("standby"), [])
        taking = asyncio.create_task(self._lease.take())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
            await card.unsubscribe()
            if taking.done():
                await self._lead(await taking)
        finally:
            taking.cancel()
            stopping.cancel()
            await self._lease.release()

    def stop(self, reason: str) -> None:
        """End `run` soon."""
        log.info("stopping: %s", reason)
        self._stopped.set()
        self._wake.set()

    async def _lead(self, term: int) -> None:
        core = self._build_core(term)
        log.info("holding the lease in term %d", term)
        try:
            async with asyncio.TaskGroup() as tasks:
                store_calls = StoreCalls(
                    self._store,
                    tasks,
                    term=lambda: core.term,
                    shorten=self._shorten,
                    answer=self._answered,
                )
                calls = _Calls(store_calls, PredictorCalls(self._bus, tasks, answer=self._put))
                tasks.create_task(self._decide(core, calls, tasks))
                await self._stopped.wait()
                raise _StoppedError
        except BaseExceptionGroup as group:
            _, failures = group.split(_StoppedError)
            if failures is not None:
                raise _cause(failures) from failures

    # --- the loop ------------------------------------------------------------------------------

    async def _decide(self, core: Core, calls: _Calls, tasks: asyncio.TaskGroup) -> None:
        listening = [await self._bus.subscribe(subjects.ALL_WORKER_EVENTS, self._receive)]
        try:
            run_id = await self._read_run_id()
            self._events.appendleft(Recovered(await calls.store.read_active()))
            listening.append(await self._bus.serve(self._card("leader"), self._endpoints(core)))
            tasks.create_task(self._keep_lease())
            tasks.create_task(self._watch(core, run_id))
            while True:
                await self._wait(core)
                while self._events:
                    await self._handle(core, calls, tasks, self._events.popleft())
                await self._execute(core.tick(self._clocks.monotonic()), calls, tasks)
        finally:
            for subscription in listening:
                await subscription.unsubscribe()

    async def _wait(self, core: Core) -> None:
        """Until there is an event, or something is due."""
        self._wake.clear()
        if self._events:
            return
        due = core.wake_at()
        timeout_s = None if due is None else max(due - self._clocks.monotonic(), 0.0)
        try:
            # Not wait_for: it swallows a cancellation that comes together with the wake-up.
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _handle(
        self, core: Core, calls: _Calls, tasks: asyncio.TaskGroup, event: Event
    ) -> None:
        began = self._clocks.precise()
        effects = core.handle(self._clocks.monotonic(), event)
        self._metrics.decided(event, self._clocks.precise() - began, effects)
        await self._execute(effects, calls, tasks)

    async def _execute(
        self, effects: list[Effect], calls: _Calls, tasks: asyncio.TaskGroup
    ) -> None:
        for effect in effects:
            match effect:
                case Send():
                    await self._send(effect)
                case Admit() | Reassign() | Fail() | Load() | ListActive():
                    self._traces.calling(effect)
                    calls.store.start(effect)
                case Reply(request_id, answer):
                    self._traces.answered(request_id, answer)
                    self._desk.resolve(request_id, answer)
                case AnswerDrain(answer):
                    self._desk.resolve_drain(answer)
                case Ended(request_id):
                    self._traces.forget(request_id)
                case RaiseTerm(above):
                    tasks.create_task(self._raise_term(above))
                case Log(level, text):
                    log.log(logging.WARNING if level == "warning" else logging.INFO, text)
                case Ask(query):
                    calls.predictor.start(query)

    async def _send(self, send: Send) -> None:
        try:
            await self._bus.publish(
                subjects.command_step(send.instance_id), encode(self._traces.decorate(send))
            )
        except BusUnavailableError as error:
            self._metrics.dropped("unsent")
            log.debug("a command was not sent, and will be again: %s", error)

    # --- what comes in -------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    def _receive(self, message: BusMessage) -> None:
        try:
            event = decode_worker_event(message.data)
        except msgspec.DecodeError as error:
            self._metrics.dropped("invalid")
            log.warning("dropped a message on %s: %s", message.subject, error)
            return
        if isinstance(event, InstanceUp | Heartbeat):
            for note in self._notes.heard(event.info):
                log.warning(note)
        self._put(event)

    def _submitted(self, submit: Submit, message: BusMessage) -> Submit:
        """On the core's clock."""
        self._traces.submitted(submit.request_id, message.headers)
        return msgspec.structs.replace(submit, arrival_s=submit.arrival_s + self._offset_s())

    def _answered(self, event: Event) -> None:
        match event:
            case AdmitAnswered(answer=answer) if answer.outcome == "admitted":
                self._crash.reach("scheduler.after_admit")
            case ReassignAnswered(answer=answer):
                self._traces.moved(event)
                if answer.outcome == "reassigned":
                    self._crash.reach("scheduler.after_reassign")
            case _:
                pass
        self._put(event)

    def _shorten(self, record: RequestRecord) -> StoredRequest:
        if record.state == "active":
            self._traces.stored(record.request.request_id, record.request.traceparent)
        return to_stored(record, offset_s=self._offset_s())

    def _offset_s(self) -> float:
        return self._clocks.monotonic() - self._clocks.wall()

    # --- beside the loop -----------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease.renew_every_s)
            if await self._lease.keep_once():
                self._put(TermRaised(self._lease.term))

    async def _raise_term(self, above: int) -> None:
        if await self._lease.raise_above(above):
            self._put(TermRaised(self._lease.term))

    async def _watch(self, core: Core, run_id: str) -> None:
        while True:
            self._metrics.refresh(core, self._clocks.monotonic())
            await asyncio.sleep(WATCH_EVERY_S)
            present = await self._read_run_id()
            if present != run_id:
                run_id = present
                self._put(StoreRestarted())

    async def _read_run_id(self) -> str:
        while True:
            try:
                return await self._store.run_id()
            except StoreUnavailableError as error:
                log.warning("the store does not answer, trying again: %s", error)
                await asyncio.sleep(WATCH_EVERY_S)

    def _endpoints(self, core: Core) -> list[Endpoint]:
        async def status(_: BusMessage) -> bytes:
            return encode(core.status(self._clocks.monotonic()))

        return [
            Endpoint("submit", subjects.REQUEST_SUBMIT, self._desk.submit),
            Endpoint("cancel", subjects.REQUEST_CANCEL, self._desk.cancel),
            Endpoint("drain", subjects.DRAIN, self._desk.drain),
            Endpoint("status", subjects.STATUS, status),
        ]

    def _card(self, role: str) -> ServiceCard:
        return ServiceCard(
            name="scheduler",
            version=__version__,
            description="admits requests, places them on instances and sets their thresholds",
            metadata=self._identity.card(self._address, role=role),
        )


class _StoppedError(Exception):
    """Ends the task group."""


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure. Anything but a lost lease is a bug, so its traceback is logged."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, LeaseLostError):
        log.error("the scheduler failed", exc_info=error)
    return error
