"""The bus: publish, request-reply and subscriptions, as a port with two adapters.

Delivery is never assumed: a message is a hint, the store is the truth, and every wait has a
time-out after which the truth is read again. `MemoryBus` and `NatsBus` pass the same contract
tests (tests/contract).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Bus", "BusMessage", "Endpoint", "MessageHandler", "ServiceCard", "Subscription"]


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A received message. `reply` is empty when nobody waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


MessageHandler = Callable[[BusMessage], None]
"""Called in order, one message at a time, on the event loop: enqueue and return."""

RequestHandler = Callable[[BusMessage], Awaitable[bytes]]
"""Answers one request; each call runs as a task of its own."""


class Subscription(Protocol):
    """A live subscription."""

    async def unsubscribe(self) -> None:
        """Stop receiving; calling it twice does no harm."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A subject on which a service answers requests."""

    name: str
    subject: str
    handler: RequestHandler
    queue: str = ""
    """Queue group: one member answers. Empty takes the adapter's default, one group a service."""


@dataclass(frozen=True, slots=True)
class ServiceCard:
    """What a service says of itself on the NATS micro API (`nats micro ls/info/stats`)."""

    name: str
    version: str
    description: str
    metadata: Mapping[str, str]
    """Always holds `id` (service instance), `pid`, and `address` (empty without a listener)."""


class Bus(Protocol):
    """Publish and subscribe by subject; `*` matches one token of a subject, `>` the rest."""

    @property
    def connected(self) -> bool:
        """Whether messages flow now, as far as is known: a hung server shows after 6 s."""
        ...

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send and forget. Raises BusUnavailableError while disconnected: nothing is buffered;
        ValueError for a malformed subject or a message above the server's limit."""
        ...

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> BusMessage:
        """Wait for one answer. Raises BusTimeoutError, NoRespondersError, ResponderFailedError
        and, while disconnected, BusUnavailableError."""
        ...

    async def request_many(self, subject: str, data: bytes, *, wait_s: float) -> list[BusMessage]:
        """Collect every answer that arrives within `wait_s` (service discovery)."""
        ...

    async def subscribe(self, subject: str, handler: MessageHandler) -> Subscription:
        """Call `handler` for every message on `subject` (wildcards allowed)."""
        ...

    async def serve(self, card: ServiceCard, endpoints: list[Endpoint]) -> Subscription:
        """Register a service and answer requests on its endpoints."""
        ...

    async def close(self) -> None:
        """Let running answers finish, send what is pending, and disconnect."""
        ...
