"""The gateway without HTTP: admits calls, hands each its deltas, and frees what is left over."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage, Subscription
from dilaserve.messages import TokenDelta, decode_to_gateway
from dilaserve.store import Store
from dilaserve.store.records import NewRequest
from dilaserve.telemetry import Telemetry
from dilaserve_gateway.admission import Admission
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.background import Background
from dilaserve_gateway.call import Call
from dilaserve_gateway.cancelling import STOPPED, cancel_request
from dilaserve_gateway.choice import Choice, Update
from dilaserve_gateway.course import course_report
from dilaserve_gateway.errors import ApiError, unavailable
from dilaserve_gateway.model import ServedModel
from dilaserve_gateway.observe import Observation
from dilaserve_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Clocks:
    """`monotonic` for durations, `wall` for what is stored; both in seconds."""

    monotonic: Clock
    wall: Clock

    def now(self) -> Moment:
        """By both."""
        return Moment(self.monotonic(), self.wall())


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment on both clocks, in seconds."""

    monotonic_s: float
    wall_s: float


class Gateway:
    """One process's calls. Holds nothing of a call after its end."""

    def __init__(
        self,
        *,
        gateway_id: str,
        model: ServedModel,
        bus: Bus,
        store: Store,
        telemetry: Telemetry,
        settings: GatewaySettings,
        clocks: Clocks,
    ) -> None:
        self.id = gateway_id
        self.model = model
        self.store = store
        self.telemetry = telemetry
        self.settings = settings
        self.clocks = clocks
        self.admission = Admission(
            bus,
            store,
            clock=clocks.monotonic,
            timeout_s=settings.admission_timeout_s,
            max_store_share=settings.max_store_share,
        )
        self._bus = bus
        self._calls: dict[str, OpenCall] = {}
        self._background = Background()
        self._subscription: Subscription | None = None
        telemetry.gauge("dilaserve:open_streams", lambda: [(len(self._calls), {})])

    @property
    def n_open(self) -> int:
        """Requests that a client waits for."""
        return len(self._calls)

    async def start(self) -> None:
        """Subscribe to the deltas of this gateway's requests."""
        self._subscription = await self._bus.subscribe(subjects.tokens(self.id), self._receive)

    def end_calls(self) -> None:
        """Tell the clients of all open calls that the gateway stops."""
        for call in set(self._calls.values()):
            call.fail(unavailable("this gateway is being stopped"), reason="gateway stopped")

    async def close(self) -> None:
        """Cancel what is still open, and stop listening after that is done."""
        for call in set(self._calls.values()):
            call.close(reason="gateway stopped")
        await self._background.close(self.settings.stop_timeout_s)
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def open(
        self,
        ask: Ask,
        request_id: str,
        headers: Mapping[str, str],
        arrived: Moment | None = None,
    ) -> OpenCall:
        """Have all choices of `ask` admitted. `arrived`: when its last byte was here, from which
        the SLO counts; None: now. Raises ApiError and UnavailableError; then, and when cancelled,
        nothing is left running."""
        arrived = arrived or self.clocks.now()
        observation = Observation(
            self.telemetry,
            self.clocks.monotonic,
            model_id=self.model.id,
            request_id=request_id,
            ask=ask,
            headers=headers,
            arrived_s=arrived.monotonic_s,
        )
        opened = OpenCall(self, ask, request_id, observation, self._call(ask, request_id))
        self._calls.update((choice.request_id, opened) for choice in opened.choices)
        try:
            await self.admission.check_store()
            await self._admit(opened, arrived, observation.trace_headers())
        except BaseException as error:
            opened.close(error)
            raise
        observation.admitted()
        return opened

    def forget(self, call: OpenCall) -> None:
        """Deliver no more to `call`."""
        for choice in call.choices:
            self._calls.pop(choice.request_id, None)

    def cancel(self, request_id: str, reason: str) -> None:
        """Free the request's slot, in the background."""
        self._background.spawn(cancel_request(self._bus, self.store, request_id, reason))

    def _call(self, ask: Ask, request_id: str) -> Call:
        choices = [self._choice(ask, request_id, index) for index in range(ask.n_choices)]
        return Call(
            choices,
            self.store,
            clock=self.clocks.monotonic,
            silence_s=self.settings.silence_s,
            read_from_store=lambda cause: self.telemetry.count(
                "dilaserve:stream_reads_total", cause=cause
            ),
        )

    def _choice(self, ask: Ask, request_id: str, index: int) -> Choice:
        return Choice(
            index,
            sibling_id(request_id, index),
            self.model.tokenizer,
            n_output=ask.n_output,
            eos_ids=frozenset() if ask.ignore_eos else self.model.eos_ids,
            stops=ask.stops,
        )

    async def _admit(self, opened: OpenCall, arrived: Moment, headers: Mapping[str, str]) -> None:
        requests = self._records(opened, arrived, headers)
        tasks = [asyncio.create_task(self._admit_one(r, opened, headers)) for r in requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit_one(
        self, request: NewRequest, opened: OpenCall, headers: Mapping[str, str]
    ) -> None:
        opened.to_cancel.add(request.request_id)
        try:
            await self.admission.admit(request, headers)
        except ApiError as error:
            if error.status != 503:  # refused for certain: there is nothing to cancel
                opened.to_cancel.discard(request.request_id)
            raise

    def _records(
        self, opened: OpenCall, arrived: Moment, headers: Mapping[str, str]
    ) -> list[NewRequest]:
        return [
            NewRequest(
                request_id=sibling_id(opened.id, index),
                model_id=self.model.id,
                prompt=prompt,
                spec=spec,
                level=opened.ask.level,
                gateway_id=self.id,
                arrival_s=arrived.wall_s,
                traceparent=headers.get("traceparent", ""),
            )
            for index, prompt, spec in opened.ask.choices()
        ]

    def _receive(self, message: BusMessage) -> None:
        try:
            delta = decode_to_gateway(message.data)
        except msgspec.DecodeError as error:
            self.telemetry.count("dilaserve:messages_dropped_total", reason="invalid")
            log.warning("dropped a message on %s: %s", message.subject, error)
            return
        call = self._calls.get(delta.request_id)
        if call is None:
            self.telemetry.count("dilaserve:messages_dropped_total", reason="stale")
            return
        call.deliver(delta)


class OpenCall:
    """An admitted call. Whoever has it must `close` it, however it ends."""

    def __init__(
        self, gateway: Gateway, ask: Ask, call_id: str, observation: Observation, call: Call
    ) -> None:
        self.id = call_id
        self.ask = ask
        self.to_cancel: set[str] = set()
        """Requests that may hold a slot and have not ended."""
        self._gateway = gateway
        self._observation = observation
        self._call = call
        self._closed = False
        self._reason = "another choice of the call failed"

    @property
    def choices(self) -> list[Choice]:
        """In the order of their index."""
        return self._call.choices

    def report(self) -> dict[str, Any]:
        """What was used for the call so far; whole after the last update."""
        courses = [choice.course for choice in self.choices]
        return course_report(self.ask.level, courses, latency_s=self._observation.latency_s)

    def deliver(self, delta: TokenDelta) -> None:
        """See Call.deliver."""
        self._call.deliver(delta)

    def fail(self, error: ApiError, *, reason: str) -> None:
        """See Call.fail. `reason` is what the records will say."""
        self._reason = reason
        self._call.fail(error)

    async def updates(self) -> AsyncGenerator[Update | None, None]:
        """See Call.updates. Ends the call when it ends."""
        try:
            async with aclosing(self._call.updates()) as updates:
                async for update in updates:
                    if update is not None:
                        self._note(update)
                    yield update
        except ApiError as error:
            self.close(error)
            raise
        self.close()

    def close(
        self, error: BaseException | None = None, *, reason: str = "client disconnected"
    ) -> None:
        """Forget the call and cancel what still runs: for `reason` or, with an error, because of
        it. The second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._gateway.forget(self)
        if isinstance(error, asyncio.CancelledError):
            error = None
        if error is not None:
            reason = self._reason
        for request_id in sorted(self.to_cancel):
            self._gateway.cancel(request_id, reason)
        self._observation.end(self.choices, error, left=bool(self._call.open_choices()))

    def _note(self, update: Update) -> None:
        self._observation.updated(update)
        if update.finish_reason is None:
            return
        self.to_cancel.discard(update.request_id)
        if self.choices[update.index].is_cut_short:
            self._gateway.cancel(update.request_id, STOPPED)


def new_request_id(prefix: str) -> str:
    """An id that nobody can guess, such as `chatcmpl-` and 32 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(16)}"


def sibling_id(request_id: str, index: int) -> str:
    """The record of choice `index`; choice 0 has the call's id."""
    return request_id if index == 0 else f"{request_id}-{index}"
