"""Requests are admitted through restarts of store and scheduler, or refused for a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.errors import BusTimeoutError, StoreUnavailableError
from dilaserve.messages import Cancelled, Refused, Submit, encode
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import DecodingSpec, NewRequest, ServiceLevel
from dilaserve_gateway.admission import Admission
from dilaserve_gateway.errors import ApiError
from dilaserve_gateway.testing import FakeFleet

Code = Literal["overloaded", "no_instance", "never_fits", "unknown", "finished"]

REQUEST = NewRequest(
    request_id="r1",
    model_id="tiny",
    prompt=[1, 2, 3],
    spec=DecodingSpec(n_output=4, block_length=32, seed=0),
    level=ServiceLevel(slo_ms=500, priority=2, min_confidence=0.6),
    gateway_id="gateway-0000",
    arrival_s=12.5,
)


@pytest.fixture
def admission(broker: MemoryBroker, memory_store: MemoryStore) -> Admission:
    return Admission(
        MemoryBus(broker), memory_store, clock=time.monotonic, timeout_s=1.0, max_store_share=0.9
    )


async def was_admitted(store: MemoryStore, request_id: str) -> bool:
    record = (await store.load([request_id]))[0]
    return record is not None and record.epoch == 1


async def later(delay_s: float, action: Callable[[], Any]) -> None:
    await asyncio.sleep(delay_s)
    result = action()
    if asyncio.iscoroutine(result):
        await result


def refusing(code: Code, retry_after_s: float | None = None) -> Callable[[Submit], Refused]:
    return lambda submit: Refused(
        request_id=submit.request_id, reason="because", code=code, retry_after_s=retry_after_s
    )


async def test_admitted(admission: Admission, fleet: FakeFleet, memory_store: MemoryStore) -> None:
    await admission.admit(REQUEST, {"traceparent": "00-1-2-03"})
    assert await was_admitted(memory_store, "r1")
    assert fleet.submits == [
        Submit(
            request_id="r1",
            model_id="tiny",
            n_prompt=3,
            n_output=4,
            block_length=32,
            arrival_s=12.5,
            slo_ms=500,
            priority=2,
            min_confidence=0.6,
        )
    ]
    assert fleet.headers[0]["traceparent"] == "00-1-2-03"


async def test_waits_for_a_scheduler_that_starts(
    admission: Admission, broker: MemoryBroker, memory_store: MemoryStore, model: Any
) -> None:
    fleet = FakeFleet(MemoryBus(broker), memory_store, model)
    async with asyncio.TaskGroup() as group:
        group.create_task(later(0.2, fleet.start))
        await admission.admit(REQUEST, {})
    assert len(fleet.submits) == 1
    await fleet.close()


async def test_waits_for_a_store_that_is_down(
    admission: Admission, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    memory_store.down = True
    async with asyncio.TaskGroup() as group:
        group.create_task(later(0.2, lambda: setattr(memory_store, "down", False)))
        await admission.admit(REQUEST, {})
    assert await was_admitted(memory_store, "r1")


async def test_a_lost_answer_of_the_store_does_no_harm(
    admission: Admission, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    memory_store.lose_answers = 1
    await admission.admit(REQUEST, {})
    assert await was_admitted(memory_store, "r1")


async def test_a_lost_answer_of_the_scheduler_does_no_harm(
    broker: MemoryBroker, memory_store: MemoryStore, fleet: FakeFleet
) -> None:
    class LosingBus(MemoryBus):
        n_lost = 0

        async def request(self, *args: Any, **kwargs: Any) -> BusMessage:
            answer = await super().request(*args, **kwargs)
            if self.n_lost == 0:
                self.n_lost += 1
                await asyncio.sleep(0.05)
                raise BusTimeoutError("lost")
            return answer

    admission = Admission(
        LosingBus(broker), memory_store, clock=time.monotonic, timeout_s=1.0, max_store_share=0.9
    )
    await admission.admit(REQUEST, {})
    assert [submit.request_id for submit in fleet.submits] == ["r1", "r1"]


async def test_over_before_the_second_attempt(admission: Admission, fleet: FakeFleet) -> None:
    fleet.refuse = refusing("finished")
    await admission.admit(REQUEST, {})


async def test_a_lost_record_is_written_again(
    admission: Admission, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    empty = memory_store.snapshot()

    def lose_once(submit: Submit) -> Refused | None:
        if len(fleet.submits) == 1:
            memory_store.restore(empty)
            return refusing("unknown")(submit)
        return None

    fleet.refuse = lose_once
    await admission.admit(REQUEST, {})
    assert await was_admitted(memory_store, "r1")


@pytest.mark.parametrize(
    ("code", "retry_after_s", "status", "header"),
    [
        ("overloaded", 3.2, 429, "4"),
        ("overloaded", None, 429, "1"),
        ("no_instance", 0.5, 503, "1"),
        ("never_fits", None, 400, None),
    ],
)
async def test_refusals(
    admission: Admission,
    fleet: FakeFleet,
    code: Code,
    retry_after_s: float | None,
    status: int,
    header: str | None,
) -> None:
    fleet.refuse = refusing(code, retry_after_s)
    with pytest.raises(ApiError, match="because") as caught:
        await admission.admit(REQUEST, {})
    assert caught.value.status == status
    assert caught.value.headers().get("Retry-After") == header
    assert len(fleet.submits) == 1


async def test_nobody_answers_in_time(admission: Admission) -> None:
    with pytest.raises(ApiError, match=r"not admitted within 1 s: nobody listens") as caught:
        await admission.admit(REQUEST, {})
    assert caught.value.status == 503
    assert "Retry-After" in caught.value.headers()


async def test_an_answer_that_makes_no_sense_is_no_answer(
    admission: Admission, broker: MemoryBroker
) -> None:
    async def nonsense(_: BusMessage) -> bytes:
        return encode(Cancelled(request_id="r1", known=True))

    card = ServiceCard("scheduler", "0", "", {"id": "x", "pid": "1", "address": ""})
    endpoint = Endpoint("submit", subjects.REQUEST_SUBMIT, nonsense)
    await MemoryBus(broker).serve(card, [endpoint])
    with pytest.raises(ApiError, match="answered by Cancelled"):
        await admission.admit(REQUEST, {})


async def test_a_store_that_is_nearly_full(broker: MemoryBroker, memory_store: MemoryStore) -> None:
    now = 0.0
    admission = Admission(
        MemoryBus(broker), memory_store, clock=lambda: now, timeout_s=1.0, max_store_share=0.9
    )
    await admission.check_store()
    await memory_store.new(REQUEST)
    memory_store.memory_limit = (await memory_store.memory()).used
    await admission.check_store()  # looked just now
    now = 1.0
    with pytest.raises(ApiError, match="the store is 100 % full") as caught:
        await admission.check_store()
    assert caught.value.status == 503
    memory_store.memory_limit *= 2
    await admission.check_store()


async def test_a_store_that_does_not_answer(
    admission: Admission, memory_store: MemoryStore
) -> None:
    memory_store.down = True
    with pytest.raises(StoreUnavailableError):
        await admission.check_store()
