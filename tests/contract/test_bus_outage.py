"""What an outage of the broker does, over the memory bus and over a real NATS server."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.errors import BusTimeoutError, BusUnavailableError
from dilaserve.testing import Broker, settled, until

CARD = ServiceCard(
    name="scheduler",
    version="0.1.0",
    description="decides",
    metadata={"id": "scheduler-12ab", "pid": "7", "address": ""},
)


async def echo(message: BusMessage) -> bytes:
    return message.subject.encode() + b"|" + message.data


class TestOutage:
    async def test_publishing_raises_and_is_not_delivered_later(
        self, broker: Broker, bus: Bus, other: Bus
    ) -> None:
        got: list[bytes] = []
        await other.subscribe("dlm.v1.a", lambda message: got.append(message.data))
        await settled(other)
        await broker.stop()
        await until(lambda: not bus.connected and not other.connected)
        with pytest.raises(BusUnavailableError, match=r"nothing was published on dlm\.v1\.a"):
            await bus.publish("dlm.v1.a", b"lost")
        with pytest.raises(BusUnavailableError, match=r"nothing was published on dlm\.v1\.a"):
            await bus.request("dlm.v1.a", b"lost", timeout_s=1)
        with pytest.raises(BusUnavailableError):
            await bus.request_many("dlm.v1.a", b"lost", wait_s=0.01)
        await broker.start()
        await until(lambda: bus.connected and other.connected)
        await settled(other)
        await bus.publish("dlm.v1.a", b"new")
        await until(lambda: b"new" in got)
        assert got == [b"new"]

    async def test_subscriptions_and_services_survive(
        self, broker: Broker, bus: Bus, other: Bus
    ) -> None:
        got: list[bytes] = []
        await other.subscribe("dlm.v1.>", lambda message: got.append(message.data))
        await other.serve(CARD, [Endpoint("echo", "req.echo", echo)])
        gone = await other.subscribe("dlm.v1.>", lambda message: got.append(b"must not come"))
        for _ in range(2):
            await broker.stop()
            await until(lambda: not other.connected)
            await gone.unsubscribe()
            await broker.start()
            await until(lambda: bus.connected and other.connected)
            await settled(other)
            await bus.publish("dlm.v1.a", b"x")
            assert (await bus.request("req.echo", b"y", timeout_s=5)).data == b"req.echo|y"
        await until(lambda: len(got) == 2)
        assert got == [b"x", b"x"]

    async def test_subscribing_while_away_takes_effect_afterwards(
        self, broker: Broker, bus: Bus
    ) -> None:
        await broker.stop()
        await until(lambda: not bus.connected)
        got: list[bytes] = []
        await bus.subscribe("dlm.v1.a", lambda message: got.append(message.data))
        await broker.start()
        await until(lambda: bus.connected)
        await settled(bus)
        await bus.publish("dlm.v1.a", b"x")
        await until(lambda: got == [b"x"])

    async def test_a_request_in_flight_times_out(self, broker: Broker, bus: Bus) -> None:
        await bus.subscribe("dlm.v1.mute", lambda message: None)
        asked = asyncio.create_task(bus.request("dlm.v1.mute", b"", timeout_s=0.5))
        await asyncio.sleep(0.05)
        await broker.stop()
        with pytest.raises(BusTimeoutError):
            await asked
        await broker.start()
        await until(lambda: bus.connected)

    async def test_closing_while_away_and_closing_twice(self, broker: Broker) -> None:
        bus = await broker.connect()
        await bus.serve(CARD, [Endpoint("echo", "dlm.v1.req.echo", echo)])
        await broker.stop()
        await bus.close()
        await bus.close()
        with pytest.raises(BusUnavailableError):
            await bus.publish("dlm.v1.a", b"")
