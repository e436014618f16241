"""The bus over NATS core (nats-py): at most once, nothing stored, nothing buffered while away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from dilaserve.bus import BusMessage, Endpoint, MessageHandler, ServiceCard
from dilaserve.bus.micro import MicroService, raise_for_error
from dilaserve.bus.subject import check_size, check_subject
from dilaserve.cancellation import kept_cancellation
from dilaserve.errors import (
    BusTimeoutError,
    BusUnavailableError,
    NoRespondersError,
    SettingsError,
)
from dilaserve.urls import without_secrets

logger = logging.getLogger(__name__)

_NOT_CONNECTED = (
    errors.OutboundBufferLimitError,
    errors.ConnectionClosedError,
    errors.ConnectionDrainingError,
    errors.ConnectionReconnectingError,
    errors.FlushTimeoutError,
)
_FLUSH_TIMEOUT_S = 2
_STATUS_HEADER = "Status"


async def connect_nats(
    url: str,
    *,
    name: str,
    start_timeout_s: float = 30.0,
    on_closed: Callable[[], None] | None = None,
) -> NatsBus:
    """Connect to a server, or to one of several separated by commas, waiting up to
    `start_timeout_s` for it to come up. Later it reconnects by itself, for ever, subscriptions
    included; `on_closed` is called when the connection ended for good without `close` (the
    server refused us): end the process then. Raises BusUnavailableError, SettingsError.
    """
    bus = NatsBus(Client(), url, on_closed)
    try:
        async with asyncio.timeout(start_timeout_s):
            await bus.open(name)
    except TimeoutError:
        cause = bus.last_error
        await bus.close()
        raise BusUnavailableError(
            f"no NATS server answers at {without_secrets(url)} after {start_timeout_s} s "
            f"({cause!r}); start one, or set DILASERVE_NATS_URL"
        ) from cause
    return bus


@dataclass(slots=True)
class BusCounts:
    """What went wrong on a connection so far."""

    n_slow_consumers: int = 0
    """Messages dropped because a handler fell too far behind."""
    n_disconnects: int = 0


class NatsBus:
    """One connection; made by `connect_nats`."""

    def __init__(self, client: Client, url: str, on_closed: Callable[[], None] | None) -> None:
        self.counts = BusCounts()
        self.last_error: Exception | None = None
        self._client = client
        self._url = url
        self._shown = without_secrets(url)
        self._on_closed = on_closed
        self._services: list[MicroService] = []
        self._closing = False
        self._announced = False

    @property
    def connected(self) -> bool:
        """Whether messages flow now."""
        return bool(self._client.is_connected)

    async def open(self, name: str) -> None:
        """Connect, trying for ever."""
        try:
            await self._client.connect(
                [part.strip() for part in self._url.split(",")],
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]  # any number of seconds works
                connect_timeout=2,
                ping_interval=2,
                max_outstanding_pings=2,
                pending_size=0,  # fail fast: what would be buffered is stale once it is sent
                skip_subject_validation=True,  # check_subject has done it
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed_for_good,
            )
        except errors.Error as error:
            raise SettingsError(
                f"DILASERVE_NATS_URL={self._shown!r}: {error}; use for example nats://127.0.0.1:4222"
            ) from error

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """See Bus.publish."""
        await self._send(subject, data, headers=headers)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> BusMessage:
        """See Bus.request."""
        self._check(subject, data)
        try:
            with kept_cancellation():
                answer = await self._client.request(
                    subject, data, timeout=timeout_s, headers=dict(headers) if headers else None
                )
        except errors.NoRespondersError:
            raise NoRespondersError(f"nobody listens on {subject}; start the service first") from (
                None
            )
        except _NOT_CONNECTED as error:
            raise self._unavailable(subject) from error
        except errors.TimeoutError:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s} s") from None
        return raise_for_error(_received(answer))

    async def request_many(self, subject: str, data: bytes, *, wait_s: float) -> list[BusMessage]:
        """See Bus.request_many."""
        answers: list[BusMessage] = []
        inbox = self._client.new_inbox()
        subscription = await self.subscribe(inbox, answers.append)
        try:
            await self._send(subject, data, reply=inbox)
            await asyncio.sleep(wait_s)
        finally:
            await subscription.unsubscribe()
        return [answer for answer in answers if _STATUS_HEADER not in answer.headers]

    async def subscribe(self, subject: str, handler: MessageHandler) -> _Subscription:
        """See Bus.subscribe."""
        return await self.subscribe_queue(subject, handler, "")

    async def subscribe_queue(
        self, subject: str, handler: MessageHandler, queue: str
    ) -> _Subscription:
        """Subscribe as a member of a queue group ("" = none). While disconnected it takes effect
        on reconnecting."""
        check_subject(subject, pattern=True)
        subscription = _Subscription(handler)
        try:
            subscription.inner = await self._client.subscribe(
                subject, queue=queue, cb=subscription.receive
            )
        except _NOT_CONNECTED as error:
            raise self._unavailable(subject) from error
        return subscription

    async def serve(self, card: ServiceCard, endpoints: list[Endpoint]) -> MicroService:
        """See Bus.serve."""
        service = MicroService(self, card, endpoints)
        await service.start()
        self._services.append(service)
        return service

    async def close(self) -> None:
        """See Bus.close. Twice does no harm."""
        self._closing = True
        for service in self._services:
            await service.unsubscribe()
        # not Client.drain: when the server hangs, it takes 12 s and raises CancelledError
        if self.connected:
            with suppress(errors.Error):
                await self._client.flush(_FLUSH_TIMEOUT_S)
        await self._client.close()

    async def _send(
        self,
        subject: str,
        data: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._check(subject, data)
        try:
            await self._client.publish(
                subject, data, reply=reply, headers=dict(headers) if headers else None
            )
        except _NOT_CONNECTED as error:
            raise self._unavailable(subject) from error

    def _check(self, subject: str, data: bytes) -> None:
        check_subject(subject)
        check_size(subject, data, self._client.max_payload)
        if not self.connected:
            raise self._unavailable(subject)

    def _unavailable(self, subject: str) -> BusUnavailableError:
        return BusUnavailableError(
            f"not connected to {self._shown}, so nothing was published on {subject}; "
            "try again later"
        )

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, errors.SlowConsumerError):
            self.counts.n_slow_consumers += 1
            logger.warning("dropped a message on %s: its handler is too slow", error.subject)
            return
        if not (isinstance(error, ConnectionResetError) and self.last_error):
            self.last_error = error  # a server resets a connection after it has said why
        if not self._client.is_connected and not self._announced:
            self._announced = True
            logger.warning("waiting for NATS at %s (%r)", self._shown, error)

    async def _on_disconnected(self) -> None:
        if not self._closing:
            self.counts.n_disconnects += 1
            self._announced = True
            logger.warning("lost NATS at %s, reconnecting", self._shown)

    async def _on_reconnected(self) -> None:
        self._announced = False
        logger.info("connected to NATS at %s again", self._shown)

    async def _on_closed_for_good(self) -> None:
        if self._closing:
            return
        logger.error("NATS at %s closed the connection (%r)", self._shown, self._client.last_error)
        if self._on_closed:
            self._on_closed()


@dataclass(slots=True)
class _Subscription:
    handler: MessageHandler
    active: bool = True
    inner: NatsSubscription | None = field(default=None)

    async def receive(self, message: Msg) -> None:
        # call_soon: an error in the handler reaches the loop's exception handler, loudly, instead
        # of nats-py's error callback, where it would look like trouble with the connection
        asyncio.get_running_loop().call_soon(self._handle, _received(message))

    async def unsubscribe(self) -> None:
        self.active = False
        inner, self.inner = self.inner, None
        if inner is None:
            return
        try:
            await inner.unsubscribe()
        except (errors.ConnectionClosedError, errors.ConnectionDrainingError):
            return  # the subscription goes with its connection

    def _handle(self, message: BusMessage) -> None:
        if self.active:
            self.handler(message)


def _received(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.reply, message.headers or {})
