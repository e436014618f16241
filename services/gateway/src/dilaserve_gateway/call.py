"""Follows one call, all its choices, from admission to the last token.

Deltas from the bus are hints: gaps and silence are filled from the store, and the record's final
state ends a choice. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from dilaserve.errors import StoreUnavailableError
from dilaserve.lifecycle import is_terminal
from dilaserve.messages import TokenDelta
from dilaserve.store import Store
from dilaserve.store.records import RequestRecord
from dilaserve_gateway.choice import Choice, Update
from dilaserve_gateway.errors import ApiError, request_failed, unavailable

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 30.0
"""How long the store may not answer before a call gives up."""
_RECENT = 0.3
"""Weight of the latest step in the mean interval between steps."""


@dataclass(slots=True)
class _Pulse:
    """When a choice was heard of or looked after, and how often it steps."""

    looked_s: float
    stepped_s: float | None = None
    interval_s: float | None = None

    def step(self, now: float) -> None:
        """A step has been applied."""
        if self.stepped_s is not None:
            latest = now - self.stepped_s
            mean = latest if self.interval_s is None else self.interval_s
            self.interval_s = mean + _RECENT * (latest - mean)
        self.looked_s = self.stepped_s = now


class Call:
    """One call's stream. `deliver` puts deltas in, `updates` takes what they bring out."""

    def __init__(
        self,
        choices: Sequence[Choice],
        store: Store,
        *,
        clock: Callable[[], float],
        silence_s: float,
        read_from_store: Callable[[str], None],
    ) -> None:
        """`read_from_store` is told the cause, `gap` or `silence`, of every reading."""
        self.choices = list(choices)
        self._by_id = {choice.request_id: choice for choice in choices}
        self._store = store
        self._clock = clock
        self._silence_s = silence_s
        self._note_reading = read_from_store
        self._deltas: asyncio.Queue[TokenDelta | ApiError] = asyncio.Queue()
        self._pulses = {choice.request_id: _Pulse(clock()) for choice in choices}
        self._store_lost_s: float | None = None

    def deliver(self, delta: TokenDelta) -> None:
        """A delta of one of the choices, from the bus."""
        self._deltas.put_nowait(delta)

    def fail(self, error: ApiError) -> None:
        """Have `updates` raise `error` after what has been delivered so far."""
        self._deltas.put_nowait(error)

    def open_choices(self) -> list[Choice]:
        """Those whose text is not complete."""
        return [choice for choice in self.choices if choice.finish_reason is None]

    async def updates(self) -> AsyncGenerator[Update | None, None]:
        """What each step brings, until every choice has finished; None now and then in silence.

        Raises ApiError when a request fails, is cancelled by someone else, or is lost.
        """
        for choice in self.choices:
            self._pulses[choice.request_id].looked_s = self._clock()
        while self.open_choices():
            delta = await self._next_delta()
            if delta is None:
                for update in await self._read_silent():
                    yield update
                yield None
                continue
            if isinstance(delta, ApiError):
                raise delta
            choice = self._by_id[delta.request_id]
            if choice.finish_reason is not None:
                continue
            for update in await self._take(choice, delta):
                yield update

    async def _next_delta(self) -> TokenDelta | ApiError | None:
        """The next delta; None when the first open choice has been silent for too long."""
        if not self._deltas.empty():
            return self._deltas.get_nowait()
        deadline = min(self._deadline(choice) for choice in self.open_choices())
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await self._deltas.get()
        except TimeoutError:
            return None

    def _deadline(self, choice: Choice) -> float:
        pulse = self._pulses[choice.request_id]
        return pulse.looked_s + max(self._silence_s, 3 * (pulse.interval_s or 0.0))

    async def _take(self, choice: Choice, delta: TokenDelta) -> list[Update]:
        offered = choice.offer(delta)
        if isinstance(offered, Update):
            self._pulses[choice.request_id].step(self._clock())
            return [offered, *(await self._read(choice) if choice.is_behind else [])]
        if offered == "gap":
            self._note_reading("gap")
            return await self._read(choice, deltas_only=True)
        return []

    async def _read_silent(self) -> list[Update]:
        now = self._clock()
        updates = []
        for choice in self.open_choices():
            if self._deadline(choice) <= now:
                self._note_reading("silence")
                updates += await self._read(choice)
        return updates

    async def _read(self, choice: Choice, *, deltas_only: bool = False) -> list[Update]:
        """Catch up from the store. The record is read before the stream, so that the stream
        holds everything when the record has ended."""
        self._pulses[choice.request_id].looked_s = self._clock()
        try:
            record = None if deltas_only else (await self._store.load([choice.request_id]))[0]
            deltas = await self._store.deltas(choice.request_id, after_step=choice.step)
        except StoreUnavailableError as error:
            self._bear(error)
            return []
        self._store_lost_s = None
        updates = choice.catch_up(deltas)
        if updates:
            self._pulses[choice.request_id].step(self._clock())
        if choice.is_behind and deltas_only:
            return updates + await self._read(choice)
        if choice.finish_reason is None and not deltas_only:
            updates += _end(choice, record)
        return updates

    def _bear(self, error: StoreUnavailableError) -> None:
        """Go on without the store for a while. Raises ApiError 503 after that."""
        now = self._clock()
        self._store_lost_s = now if self._store_lost_s is None else self._store_lost_s
        log.warning("a stream could not be read from the store, going on: %s", error)
        if now - self._store_lost_s > STORE_PATIENCE_S:
            raise unavailable(str(error)) from error


def _end(choice: Choice, record: RequestRecord | None) -> list[Update]:
    """The last update of a choice whose record says that it is over. Raises ApiError."""
    if record is None:
        raise _lost(choice.request_id)
    if not is_terminal(record.state):
        return []
    if record.state == "done":
        return [choice.settle(record)]
    raise request_failed(
        choice.request_id,
        record.error or f"it was {record.state}",
        code="request_cancelled" if record.state == "cancelled" else "request_failed",
    )


def _lost(request_id: str) -> ApiError:
    return unavailable(f"the record of request {request_id} is lost, which ends it")
