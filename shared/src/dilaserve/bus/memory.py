"""The bus in memory, with NATS's semantics: for tests and simulations in one process.

Connections to one MemoryBroker see each other's messages; nothing is kept for later.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from dilaserve.bus import BusMessage, Endpoint, MessageHandler, ServiceCard
from dilaserve.bus.micro import MicroService, raise_for_error
from dilaserve.bus.subject import check_size, check_subject, matches
from dilaserve.errors import BusTimeoutError, BusUnavailableError, NoRespondersError


class MemoryBroker:
    """What the connections of one process have in common: the subscriptions, and being up."""

    def __init__(self) -> None:
        self.up = True
        self._subscriptions: list[_MemorySubscription] = []
        self._turns: dict[str, itertools.count[int]] = {}
        self._inboxes = itertools.count(1)

    def add(self, subscription: _MemorySubscription) -> None:
        """Start delivering to a subscription."""
        self._subscriptions.append(subscription)

    def remove(self, subscription: _MemorySubscription) -> None:
        """Stop delivering; twice does no harm."""
        with suppress(ValueError):
            self._subscriptions.remove(subscription)

    def deliver(self, message: BusMessage) -> int:
        """Hand the message to every matching subscription, one per queue group, on the next turn
        of the event loop; returns to how many."""
        receivers = self._receivers(message.subject.split("."))
        for subscription in receivers:
            asyncio.get_running_loop().call_soon(subscription.receive, message)
        return len(receivers)

    def new_inbox(self) -> str:
        """A subject that nobody else listens on."""
        return f"_INBOX.{next(self._inboxes)}"

    def _receivers(self, subject: list[str]) -> list[_MemorySubscription]:
        reachable = [s for s in self._subscriptions if s.bus.connected and s.matches(subject)]
        receivers = [s for s in reachable if not s.queue]
        for queue in dict.fromkeys(s.queue for s in reachable if s.queue):
            members = [s for s in reachable if s.queue == queue]
            turn = next(self._turns.setdefault(queue, itertools.count()))
            receivers.append(members[turn % len(members)])
        return receivers


class MemoryBus:
    """One connection to a broker (by default a new one)."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._online = True
        self._services: list[MicroService] = []
        self._subscriptions: set[_MemorySubscription] = set()

    @property
    def connected(self) -> bool:
        """Whether messages flow now."""
        return self._online and self.broker.up

    def disconnect(self) -> None:
        """Lose the connection: publishing raises, what is sent meanwhile is never received."""
        self._online = False

    def reconnect(self) -> None:
        """Get the connection back, subscriptions included."""
        self._online = True

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """See Bus.publish."""
        self._send(BusMessage(subject, data, headers=dict(headers or {})))

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> BusMessage:
        """See Bus.request."""
        answer: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()

        def on_answer(message: BusMessage) -> None:
            if not answer.done():
                answer.set_result(message)

        inbox = self.broker.new_inbox()
        subscription = await self.subscribe(inbox, on_answer)
        try:
            if not self._send(BusMessage(subject, data, inbox, dict(headers or {}))):
                raise NoRespondersError(f"nobody listens on {subject}; start the service first")
            async with asyncio.timeout(timeout_s):
                return raise_for_error(await answer)
        except TimeoutError:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s} s") from None
        finally:
            await subscription.unsubscribe()

    async def request_many(self, subject: str, data: bytes, *, wait_s: float) -> list[BusMessage]:
        """See Bus.request_many."""
        answers: list[BusMessage] = []
        inbox = self.broker.new_inbox()
        subscription = await self.subscribe(inbox, answers.append)
        try:
            self._send(BusMessage(subject, data, inbox))
            await asyncio.sleep(wait_s)
        finally:
            await subscription.unsubscribe()
        return answers

    async def subscribe(self, subject: str, handler: MessageHandler) -> _MemorySubscription:
        """See Bus.subscribe."""
        return await self.subscribe_queue(subject, handler, "")

    async def subscribe_queue(
        self, subject: str, handler: MessageHandler, queue: str
    ) -> _MemorySubscription:
        """Subscribe as a member of a queue group ("" = none)."""
        check_subject(subject, pattern=True)
        subscription = _MemorySubscription(self, subject.split("."), handler, queue)
        self._subscriptions.add(subscription)
        self.broker.add(subscription)
        return subscription

    async def serve(self, card: ServiceCard, endpoints: list[Endpoint]) -> MicroService:
        """See Bus.serve."""
        service = MicroService(self, card, endpoints)
        await service.start()
        self._services.append(service)
        return service

    async def close(self) -> None:
        """See Bus.close."""
        for service in self._services:
            await service.unsubscribe()
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        self._online = False

    def forget(self, subscription: _MemorySubscription) -> None:
        """Remove a subscription of this connection."""
        self._subscriptions.discard(subscription)
        self.broker.remove(subscription)

    def _send(self, message: BusMessage) -> int:
        check_subject(message.subject)
        check_size(message.subject, message.data)
        if not self.connected:
            raise BusUnavailableError(
                f"not connected, so nothing was published on {message.subject}; try again later"
            )
        return self.broker.deliver(message)


@dataclass(slots=True, eq=False)
class _MemorySubscription:
    bus: MemoryBus
    pattern: list[str]
    handler: MessageHandler
    queue: str
    active: bool = field(default=True, init=False)

    def matches(self, subject: list[str]) -> bool:
        return matches(self.pattern, subject)

    def receive(self, message: BusMessage) -> None:
        if self.active and self.bus.connected:
            self.handler(message)

    async def unsubscribe(self) -> None:
        self.active = False
        self.bus.forget(self)
