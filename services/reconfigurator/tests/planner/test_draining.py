"""What is asked of the scheduler, and what its answers mean."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBus
from dilaserve.errors import UnavailableError
from dilaserve.messages import Message, encode
from dilaserve.plan_messages import Drain, Drained, NotDrained, decode_drain
from dilaserve_reconfigurator.draining import BusDrainer

CARD = ServiceCard(name="scheduler", version="1", description="", metadata={"id": "s", "pid": "1"})


class Scheduler:
    """Answers what it is told to."""

    def __init__(self, answer: Message | bytes) -> None:
        self.answer = answer
        self.asked: list[Drain] = []

    async def drain(self, message: BusMessage) -> bytes:
        self.asked.append(decode_drain(message.data))
        return self.answer if isinstance(self.answer, bytes) else encode(self.answer)


@asynccontextmanager
async def asking(scheduler: Scheduler, ids: dict[str, str]) -> AsyncIterator[BusDrainer]:
    bus = MemoryBus()
    await bus.serve(CARD, [Endpoint("drain", subjects.DRAIN, scheduler.drain)])
    yield BusDrainer(bus, ids.get, hold_s=7.0)
    await bus.close()


async def test_asks_by_the_id_of_the_present_incarnation_also_when_it_has_gone() -> None:
    scheduler, ids = Scheduler(Drained(instance_id="a-0001", n_left=3)), {"a": "a-0001"}
    async with asking(scheduler, ids) as drainer:
        assert await drainer.drain("a") == 3
        ids["a"] = "a-0002"
        await drainer.drain("a")
        del ids["a"]
        await drainer.drain("a")
        await drainer.resume("a")
    first, second = Drain(instance_id="a-0001", hold_s=7.0), Drain(instance_id="a-0002", hold_s=7.0)
    assert scheduler.asked[:3] == [first, second, second]
    assert scheduler.asked[3].resume


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (NotDrained(instance_id="a-0001", reason="no such instance"), "no such instance"),
        (b"{}", "makes no sense"),
    ],
)
async def test_an_answer_that_helps_nobody_is_no_answer(
    answer: Message | bytes, reason: str
) -> None:
    async with asking(Scheduler(answer), {"a": "a-0001"}) as drainer:
        with pytest.raises(UnavailableError, match=reason):
            await drainer.drain("a")


async def test_one_that_was_never_heard_cannot_be_asked_for() -> None:
    async with asking(Scheduler(b""), {}) as drainer:
        with pytest.raises(UnavailableError, match="a is not heard"):
            await drainer.drain("a")


async def test_without_a_scheduler_nobody_answers() -> None:
    with pytest.raises(UnavailableError):
        await BusDrainer(MemoryBus(), {"a": "a-0001"}.get, hold_s=1.0).drain("a")
