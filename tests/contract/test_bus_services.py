"""Services on the bus: discovery, description, statistics; over both buses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.errors import (
    NoRespondersError,
    ResponderFailedError,
)
from dilaserve.testing import Broker, settled

SETTLE_S = 0.1

CARD = ServiceCard(
    name="scheduler",
    version="0.1.0",
    description="decides",
    metadata={"id": "scheduler-12ab", "pid": "7", "address": ""},
)


async def echo(message: BusMessage) -> bytes:
    return message.subject.encode() + b"|" + message.data


class TestServe:
    """The answers are parsed by nats-py's own reader of the micro protocol."""

    async def test_ping_finds_every_instance(self, bus: Bus, other: Bus) -> None:
        await bus.serve(CARD, [])
        await other.serve(
            ServiceCard("gateway", "0.1.0", "listens", {"id": "gateway-1", "pid": "8"}), []
        )
        await settled(other)
        found = [ServicePing.from_dict(p) for p in await ask_all(bus, "$SRV.PING")]
        assert {(p.name, p.id, p.metadata["pid"]) for p in found} == {
            ("scheduler", "scheduler-12ab", "7"),
            ("gateway", "gateway-1", "8"),
        }
        assert all(p.type == "io.nats.micro.v1.ping_response" for p in found)
        assert len(await ask_all(bus, "$SRV.PING.gateway")) == 1
        assert len(await ask_all(bus, "$SRV.PING.gateway.gateway-1")) == 1
        assert await ask_all(bus, "$SRV.PING.gateway.gateway-2") == []

    async def test_info_describes_endpoints(self, bus: Bus) -> None:
        await bus.serve(CARD, [Endpoint("echo", "dlm.v1.req.echo", echo)])
        [answer] = await ask_all(bus, "$SRV.INFO.scheduler")
        info = ServiceInfo.from_dict(answer)
        assert (info.description, info.version) == ("decides", "0.1.0")
        [endpoint] = info.endpoints
        assert (endpoint.name, endpoint.subject) == ("echo", "dlm.v1.req.echo")
        assert endpoint.queue_group == "q"

    async def test_stats_count_requests_and_errors(
        self, bus: Bus, loop_errors: list[BaseException]
    ) -> None:
        async def moody(message: BusMessage) -> bytes:
            await asyncio.sleep(0.01)
            if message.data == b"bad":
                raise ValueError("bad")
            return b""

        await bus.serve(CARD, [Endpoint("moody", "dlm.v1.req.moody", moody)])
        for data in (b"good", b"good", b"bad"):
            try:
                await bus.request("dlm.v1.req.moody", data, timeout_s=5)
            except ResponderFailedError:
                assert data == b"bad"
        [answer] = await ask_all(bus, "$SRV.STATS.scheduler.scheduler-12ab")
        [stats] = ServiceStats.from_dict(answer).endpoints
        assert (stats.num_requests, stats.num_errors) == (3, 1)
        assert stats.last_error == "ValueError('bad')"
        assert stats.processing_time >= 3 * 10_000_000
        assert stats.average_processing_time == stats.processing_time // 3
        assert len(loop_errors) == 1

    async def test_unsubscribed_service_is_gone(self, bus: Bus) -> None:
        service = await bus.serve(CARD, [Endpoint("echo", "dlm.v1.req.echo", echo)])
        await service.unsubscribe()
        await service.unsubscribe()
        with pytest.raises(NoRespondersError):
            await bus.request("dlm.v1.req.echo", b"", timeout_s=5)
        assert await ask_all(bus, "$SRV.PING") == []

    async def test_closing_lets_an_answer_finish(self, broker: Broker, other: Bus) -> None:
        asked = asyncio.Event()

        async def slow(message: BusMessage) -> bytes:
            asked.set()
            await asyncio.sleep(0.1)
            return b"done"

        server = await broker.connect()
        await server.serve(CARD, [Endpoint("slow", "dlm.v1.req.slow", slow)])
        await settled(server)
        answer = asyncio.create_task(other.request("dlm.v1.req.slow", b"", timeout_s=5))
        await asked.wait()
        await server.close()
        assert (await answer).data == b"done"


async def ask_all(bus: Bus, subject: str) -> list[dict[str, Any]]:
    answers = await bus.request_many(subject, b"", wait_s=SETTLE_S)
    return [msgspec.json.decode(answer.data) for answer in answers]
