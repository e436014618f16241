"""The NATS micro protocol (ADR-32): discovery, description and statistics of services.

Works over any bus, so `nats micro ls/info/stats` and the in-memory tests see the same answers.
Ours rather than nats.micro's, because that one answers requests one after the other and gives
instances ids of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from dilaserve.bus import BusMessage, Endpoint, MessageHandler, ServiceCard, Subscription
from dilaserve.errors import BusUnavailableError, ResponderFailedError

PREFIX = "$SRV"
DEFAULT_QUEUE = "q"
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"


class QueueBus(Protocol):
    """What a bus must do to carry services."""

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send and forget."""
        ...

    async def subscribe_queue(
        self, subject: str, handler: MessageHandler, queue: str
    ) -> Subscription:
        """Subscribe as a member of a queue group ("" = none); one member gets each message."""
        ...


def raise_for_error(answer: BusMessage) -> BusMessage:
    """The answer itself, or ResponderFailedError when it reports one."""
    if ERROR_HEADER in answer.headers:
        raise ResponderFailedError(
            f"the service failed to answer ({answer.headers[ERROR_HEADER]}); see its log"
        )
    return answer


class MicroService:
    """One registered service: its control subjects and its endpoints."""

    def __init__(self, bus: QueueBus, card: ServiceCard, endpoints: list[Endpoint]) -> None:
        self._bus = bus
        self._card = card
        self._endpoints = [_RunningEndpoint(bus, endpoint) for endpoint in endpoints]
        self._started = datetime.now(UTC)
        self._subscriptions: list[Subscription] = []
        self._replies: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe to the control subjects and to those of the endpoints."""
        for endpoint in self._endpoints:
            self._subscriptions.append(await endpoint.subscribe())
        name, service_id = self._card.name, self._card.metadata["id"]
        for verb, describe in (("PING", self.ping), ("INFO", self.info), ("STATS", self.stats)):
            for subject in (verb, f"{verb}.{name}", f"{verb}.{name}.{service_id}"):
                handler = self._control(describe)
                self._subscriptions.append(
                    await self._bus.subscribe_queue(f"{PREFIX}.{subject}", handler, "")
                )

    async def unsubscribe(self, *, grace_s: float = 2.0) -> None:
        """Take no more requests and wait up to `grace_s` for those that are being answered."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()
        tasks = self._replies.union(*(endpoint.running for endpoint in self._endpoints))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()

    def ping(self) -> dict[str, Any]:
        """Answer to $SRV.PING."""
        return self._identity("ping_response")

    def info(self) -> dict[str, Any]:
        """Answer to $SRV.INFO."""
        return self._identity("info_response") | {
            "description": self._card.description,
            "endpoints": [endpoint.identity() | {"metadata": {}} for endpoint in self._endpoints],
        }

    def stats(self) -> dict[str, Any]:
        """Answer to $SRV.STATS; times in nanoseconds."""
        return self._identity("stats_response") | {
            "started": self._started.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "endpoints": [endpoint.stats() for endpoint in self._endpoints],
        }

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}",
            "name": self._card.name,
            "id": self._card.metadata["id"],
            "version": self._card.version,
            "metadata": dict(self._card.metadata),
        }

    def _control(self, describe: Any) -> MessageHandler:
        def on_query(message: BusMessage) -> None:
            data = msgspec.json.encode(describe())
            task = asyncio.get_running_loop().create_task(_reply(self._bus, message, data))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)

        return on_query


@dataclass(slots=True)
class _RunningEndpoint:
    bus: QueueBus
    endpoint: Endpoint
    running: set[asyncio.Task[None]] = field(default_factory=set)
    n_requests: int = 0
    n_errors: int = 0
    last_error: str = ""
    processing_ns: int = 0

    @property
    def queue(self) -> str:
        return self.endpoint.queue or DEFAULT_QUEUE

    async def subscribe(self) -> Subscription:
        return await self.bus.subscribe_queue(self.endpoint.subject, self.on_request, self.queue)

    def on_request(self, message: BusMessage) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _answer(self, message: BusMessage) -> None:
        started = time.perf_counter_ns()
        call = asyncio.ensure_future(self.endpoint.handler(message))
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
        self.n_requests += 1
        self.processing_ns += time.perf_counter_ns() - started
        if error := call.exception():
            await self._answer_error(message, error)
        else:
            await _reply(self.bus, message, call.result())

    async def _answer_error(self, message: BusMessage, error: BaseException) -> None:
        self.n_errors += 1
        self.last_error = repr(error)
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"endpoint {self.endpoint.name} failed", "exception": error}
        )
        headers = {ERROR_HEADER: self.last_error, ERROR_CODE_HEADER: "500"}
        await _reply(self.bus, message, b"", headers)

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.endpoint.name,
            "subject": self.endpoint.subject,
            "queue_group": self.queue,
        }

    def stats(self) -> dict[str, Any]:
        return self.identity() | {
            "num_requests": self.n_requests,
            "num_errors": self.n_errors,
            "last_error": self.last_error,
            "processing_time": self.processing_ns,
            "average_processing_time": self.processing_ns // max(self.n_requests, 1),
            "data": None,
        }


async def _reply(
    bus: QueueBus, message: BusMessage, data: bytes, headers: Mapping[str, str] | None = None
) -> None:
    if message.reply:
        with suppress(BusUnavailableError):  # the asker's time-out covers a lost answer
            await bus.publish(message.reply, data, headers=headers)
