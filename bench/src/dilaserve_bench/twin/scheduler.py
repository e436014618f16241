"""The scheduler's process on virtual time: feeds the production core, carries out what it wants.

The core takes no time to decide. Messages to and from it take `bus_s`, store calls `store_s`; the
store does what it is asked at once, and the answer comes later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dilaserve.messages import Admitted, Cancelled, Refused
from dilaserve.plan_messages import Drained, NotDrained
from dilaserve_bench.twin.store import TwinStore
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_scheduler.core import Core, CoreSettings
from dilaserve_scheduler.core.effects import (
    Admit,
    AnswerDrain,
    Ask,
    Effect,
    Fail,
    ListActive,
    Load,
    RaiseTerm,
    Reassign,
    Reply,
    Send,
)
from dilaserve_scheduler.core.events import (
    ActiveListed,
    AdmitAnswered,
    Event,
    FailAnswered,
    Loaded,
    ReassignAnswered,
    Recovered,
    StoredRequest,
    TermRaised,
    Told,
)
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.records import to_stored

__all__ = ["Adviser", "CoreCalls", "Outside", "VirtualScheduler"]


class Adviser(Protocol):
    """Answers what a policy asks (core.policy.Inquire): in production, the step predictor."""

    def answer(self, now: float, query: object) -> object:
        """What comes to Policy.told; None says nothing."""
        ...


class Outside(Protocol):
    """Who receives what the scheduler sends, when it arrives."""

    def command(self, sent: Send) -> None:
        """For an instance, if it is there."""
        ...

    def reply(self, answer: Admitted | Refused | Cancelled) -> None:
        """For the client of a request."""
        ...

    def drained(self, answer: Drained | NotDrained) -> None:
        """For the planner."""
        ...

    def moving(self, call: Reassign) -> None:
        """A request is to change its owner (for the record, not a message)."""
        ...


@dataclass(slots=True)
class CoreCalls:
    """The core's calls, in order, each with what it took on the machine that runs this."""

    at_s: array[float] = field(default_factory=lambda: array("d"))
    """Virtual time."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    kinds: list[str] = field(default_factory=list)
    """The event's type, or "tick"."""

    def add(self, at_s: float, seconds: float, kind: str) -> None:
        """One more."""
        self.at_s.append(at_s)
        self.seconds.append(seconds)
        self.kinds.append(kind)


class VirtualScheduler:
    """One scheduler at a time. `policy` makes a fresh policy for every start. `timer`, where given,
    counts the seconds that the core takes on the machine that runs this."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        settings: CoreSettings,
        *,
        timeline: Timeline,
        store: TwinStore,
        outside: Outside,
        bus_s: float,
        store_s: float,
        adviser: Adviser | None = None,
        advice_s: float = 0.0,
        timer: Callable[[], float] | None = None,
    ) -> None:
        self.calls = CoreCalls()
        """Of the core, where there is a timer."""
        self.core: Core | None = None
        """None while it is down."""
        self._policy = policy
        self._settings = settings
        self._timeline = timeline
        self._store = store
        self._outside = outside
        self._bus_s = bus_s
        self._store_s = store_s
        self._adviser = adviser
        self._advice_s = advice_s
        self._timer = timer
        self._paused_until = 0.0
        self._tick_at: float | None = None
        self._carry_out: dict[type, Callable[[Core, Any], None]] = {
            Send: self._command,
            Reply: self._reply,
            AnswerDrain: self._answer_drain,
            Admit: self._admit,
            Reassign: self._reassign,
            Fail: self._fail,
            Load: self._load,
            ListActive: self._list_active,
            RaiseTerm: self._raise_term,
            Ask: self._ask,
        }

    # --- its life ------------------------------------------------------------------------------

    def start(self, _: None = None) -> None:
        """Take over: a higher term, and all that is stored."""
        self.core = Core(self._policy(), self._settings, term=self._store.take_lease())
        stored = self._stored(self._store.active())
        self._feed(Recovered(tuple(record for record in stored if record is not None)))

    def crash(self, down_s: float) -> None:
        """Die with all that is in memory, and be started again."""
        self.core = self._tick_at = None
        self._timeline.after(down_s, self.start)

    def pause(self, seconds: float) -> None:
        """Stand still; what arrives meanwhile waits."""
        self._paused_until = self._timeline.now + seconds

    def send(self, event: Event, delay_s: float = 0.0) -> None:
        """Have a message arrive a bus latency after `delay_s`; lost if nobody is there then."""
        self._timeline.after(delay_s + self._bus_s, self._arrive, event)

    # --- events --------------------------------------------------------------------------------

    def _arrive(self, event: Event) -> None:
        if self._timeline.now < self._paused_until:
            self._timeline.at(self._paused_until, self._arrive, event)
        elif self.core is not None:
            self._feed(event)

    def _feed(self, event: Event) -> None:
        core, now = self.core, self._timeline.now
        assert core is not None
        if self._timer is None:
            effects = core.handle(now, event)
        else:
            started = self._timer()
            effects = core.handle(now, event)
            self.calls.add(now, self._timer() - started, type(event).__name__)
        self._execute(core, effects)

    def _tick(self, time_s: float) -> None:
        core, now = self.core, self._timeline.now
        if core is None or time_s != self._tick_at:
            return
        if now < self._paused_until:
            self._timeline.at(self._paused_until, self._tick, time_s)
            return
        self._tick_at = None
        if self._timer is None:
            effects = core.tick(now)
        else:
            started = self._timer()
            effects = core.tick(now)
            self.calls.add(now, self._timer() - started, "tick")
        self._execute(core, effects)

    def _execute(self, core: Core, effects: list[Effect]) -> None:
        for effect in effects:
            carry_out = self._carry_out.get(type(effect))
            if carry_out is not None:
                carry_out(core, effect)
        wake_at = core.wake_at()
        if wake_at is not None and (self._tick_at is None or wake_at < self._tick_at):
            self._tick_at = max(wake_at, self._timeline.now)
            self._timeline.at(self._tick_at, self._tick, self._tick_at)

    # --- effects -------------------------------------------------------------------------------

    def _command(self, _: Core, effect: Send) -> None:
        self._timeline.after(self._bus_s, self._outside.command, effect)

    def _reply(self, _: Core, effect: Reply) -> None:
        self._timeline.after(self._bus_s, self._outside.reply, effect.answer)

    def _answer_drain(self, _: Core, effect: AnswerDrain) -> None:
        self._timeline.after(self._bus_s, self._outside.drained, effect.answer)

    def _admit(self, core: Core, call: Admit) -> None:
        answer = self._store.admit(call.request_id, term=core.term, owner=call.owner)
        self._answer(core, AdmitAnswered(call.op, call.request_id, answer))

    def _reassign(self, core: Core, call: Reassign) -> None:
        self._outside.moving(call)
        answer = self._store.reassign(
            call.request_id,
            term=core.term,
            owner=call.owner,
            expected_epoch=call.expected_epoch,
            min_epoch=call.min_epoch,
            owner_died=call.owner_died,
        )
        self._answer(core, ReassignAnswered(call.op, call.request_id, answer))

    def _fail(self, core: Core, call: Fail) -> None:
        answer = self._store.fail(call.request_id, term=core.term, error=call.error)
        self._answer(core, FailAnswered(call.op, call.request_id, answer))

    def _load(self, core: Core, call: Load) -> None:
        stored = self._stored(call.request_ids)
        absent = [i for i, r in zip(call.request_ids, stored, strict=True) if r is None]
        records = tuple(record for record in stored if record is not None)
        self._answer(core, Loaded(call.op, records, tuple(absent)))

    def _list_active(self, core: Core, _: ListActive) -> None:
        self._answer(core, ActiveListed(tuple(self._store.active())))

    def _raise_term(self, core: Core, effect: RaiseTerm) -> None:
        self._answer(core, TermRaised(self._store.take_lease(effect.above + 1)))

    def _ask(self, core: Core, effect: Ask) -> None:
        if self._adviser is not None:
            answer = self._adviser.answer(self._timeline.now, effect.query)
            if answer is not None:
                self._timeline.after(self._advice_s, self._answered, (core, Told(answer)))

    def _answer(self, core: Core, event: Event) -> None:
        self._timeline.after(self._store_s, self._answered, (core, event))

    def _answered(self, answered: tuple[Core, Event]) -> None:
        core, event = answered
        if core is self.core:  # else whoever asked is dead
            self._arrive(event)

    def _stored(self, request_ids: Sequence[str]) -> list[StoredRequest | None]:
        records = self._store.load(request_ids)
        return [to_stored(r, offset_s=0.0) if r is not None else None for r in records]
