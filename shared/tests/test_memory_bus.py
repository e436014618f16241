"""What only the memory bus does: one connection of several is cut off."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.bus import BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.errors import BusUnavailableError, NoRespondersError

CARD = ServiceCard("worker", "0.1.0", "computes", {"id": "w-1", "pid": "1", "address": ""})


async def test_a_connection_that_is_cut_off_neither_sends_nor_hears() -> None:
    broker = MemoryBroker()
    cut, other = MemoryBus(broker), MemoryBus(broker)
    heard: list[bytes] = []
    await cut.subscribe("dlm.v1.a", lambda message: heard.append(message.data))
    cut.disconnect()
    with pytest.raises(BusUnavailableError):
        await cut.publish("dlm.v1.a", b"1")
    await other.publish("dlm.v1.a", b"2")
    await asyncio.sleep(0)
    cut.reconnect()
    await other.publish("dlm.v1.a", b"3")
    await asyncio.sleep(0)
    assert heard == [b"3"]


async def test_what_is_on_its_way_is_lost_with_the_connection() -> None:
    broker = MemoryBroker()
    cut, other = MemoryBus(broker), MemoryBus(broker)
    heard: list[bytes] = []
    await cut.subscribe("dlm.v1.a", lambda message: heard.append(message.data))
    await other.publish("dlm.v1.a", b"1")
    cut.disconnect()
    await asyncio.sleep(0)
    cut.reconnect()
    await asyncio.sleep(0)
    assert heard == []


async def test_a_service_that_is_cut_off_does_not_respond() -> None:
    async def answer(message: BusMessage) -> bytes:
        return b"yes"

    broker = MemoryBroker()
    service, asker = MemoryBus(broker), MemoryBus(broker)
    await service.serve(CARD, [Endpoint("ask", "dlm.v1.ask", answer)])
    assert (await asker.request("dlm.v1.ask", b"", timeout_s=1)).data == b"yes"
    service.disconnect()
    with pytest.raises(NoRespondersError):
        await asker.request("dlm.v1.ask", b"", timeout_s=1)
    service.reconnect()
    assert (await asker.request("dlm.v1.ask", b"", timeout_s=1)).data == b"yes"
    await service.close()
    await asker.close()


async def test_buses_without_a_common_broker_do_not_hear_each_other() -> None:
    heard: list[BusMessage] = []
    await MemoryBus().subscribe(">", heard.append)
    await MemoryBus().publish("dlm.v1.a", b"")
    await asyncio.sleep(0)
    assert heard == []
