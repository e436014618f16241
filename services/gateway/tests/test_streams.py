"""Calls through lost, repeated and late deltas, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from dilaserve import subjects
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.messages import Refused, Submit, TokenDelta, encode
from dilaserve.store.memory import MemoryStore
from dilaserve.telemetry import Telemetry
from dilaserve.testing import until
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.choice import Update
from dilaserve_gateway.errors import ApiError
from dilaserve_gateway.gateway import Gateway, OpenCall
from dilaserve_gateway.testing import CONFIDENCE, FakeFleet, publish_last

LONG = "the quick brown fox jumps over the lazy dog"


def ask(**fields: Any) -> Ask:
    defaults: dict[str, Any] = {
        "operation": "chat",
        "prompts": ([5, 6],),
        "n_output": 64,
        "seed": 0,
        "block_length": 32,
    }
    return Ask(**(defaults | fields))


async def texts(call: OpenCall) -> list[str]:
    pieces = [""] * len(call.choices)
    async for update in call.updates():
        if update is not None:
            pieces[update.index] += update.text
    return pieces


async def state_of(store: MemoryStore, request_id: str) -> str:
    record = (await store.load([request_id]))[0]
    assert record is not None
    return record.state


async def ends_as(store: MemoryStore, request_id: str, state: str, error: str) -> None:
    async with asyncio.timeout(5):
        while await state_of(store, request_id) in ("new", "active"):
            await asyncio.sleep(0.005)
    record = (await store.load([request_id]))[0]
    assert record is not None
    assert (record.state, record.error) == (state, error)


def reads(telemetry: Telemetry, cause: str) -> float:
    for line in telemetry.render()[0].decode().splitlines():
        if line.startswith(f'dilaserve:stream_reads_total{{cause="{cause}"}}'):
            return float(line.split()[-1])
    return 0.0


async def test_text_comes_in_order(gateway: Gateway, fleet: FakeFleet) -> None:
    call = await gateway.open(ask(), "call", {})
    updates = [update async for update in call.updates() if update is not None]
    assert "".join(update.text for update in updates) == "hello world"
    assert [update.step.step for update in updates] == [1, 2, 3, 4, 5, 6]
    assert updates[0].text == ""  # positions 2 and 3
    assert all(scored.confidence == CONFIDENCE for u in updates for scored in u.tokens)
    assert updates[-1].finish_reason == "stop"
    assert gateway.n_open == 0


def lose(rate: float) -> Callable[[list[TokenDelta]], list[TokenDelta]]:
    dice = random.Random(1)
    return lambda deltas: [delta for delta in deltas[-1:] if dice.random() >= rate]


def repeat_all(deltas: list[TokenDelta]) -> list[TokenDelta]:
    return [*deltas, deltas[0]]


def hold_and_reverse(deltas: list[TokenDelta]) -> list[TokenDelta]:
    return list(reversed(deltas[-3:])) if len(deltas) % 3 == 0 else []


def only_last(deltas: list[TokenDelta]) -> list[TokenDelta]:
    return [delta for delta in deltas[-1:] if delta.finish_reason]


def malformed(deltas: list[TokenDelta]) -> list[TokenDelta]:
    return [msgspec.structs.replace(deltas[-1], positions=[99, 98], confidences=[])]


@pytest.mark.parametrize(
    ("mangle", "cause"),
    [
        (lose(0.5), "either"),
        (lose(1.0), "silence"),
        (repeat_all, "none"),
        (hold_and_reverse, "either"),
        (only_last, "either"),
        (malformed, "gap"),
    ],
)
async def test_deltas_are_hints(
    gateway: Gateway,
    fleet: FakeFleet,
    telemetry: Telemetry,
    mangle: Callable[[list[TokenDelta]], list[TokenDelta]],
    cause: str,
) -> None:
    fleet.mangle = mangle
    fleet.answer = lambda _: LONG
    fleet.step_s = 0.002
    call = await gateway.open(ask(), "call", {})
    async with asyncio.timeout(10):
        assert await texts(call) == [LONG]
    assert call.choices[0].n_tokens == len(LONG)
    gaps, silences = reads(telemetry, "gap"), reads(telemetry, "silence")
    if cause == "none":
        assert gaps == 0
    else:
        assert {"gap": gaps, "silence": silences, "either": gaps + silences}[cause] > 0


async def test_many_calls_at_once(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.answer = lambda request: f"{request.request_id} {LONG}"
    fleet.step_s = 0.001
    dice = random.Random(2)

    def rough(deltas: list[TokenDelta]) -> list[TokenDelta]:
        return [d for d in deltas[-2:] if dice.random() < 0.7]

    fleet.mangle = rough

    async def one(name: str) -> list[str]:
        return await texts(await gateway.open(ask(n=2), name, {}))

    answers = await asyncio.gather(*(one(f"c{i}") for i in range(60)))
    for i, (first, second) in enumerate(answers):
        assert first == f"c{i} {LONG}"
        assert second == f"c{i}-1 {LONG}"
    assert gateway.n_open == 0
    assert fleet.cancels == []


async def test_siblings_are_records_with_their_own_seeds(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    call = await gateway.open(ask(n=3, prompts=([5], [6]), seed=9), "call", {})
    assert await texts(call) == ["hello world"] * 6
    ids = ["call", *(f"call-{i}" for i in range(1, 6))]
    records = [record for record in await memory_store.load(ids) if record is not None]
    assert len(records) == 6
    assert len({record.request.spec.seed for record in records}) == 6
    assert [record.request.prompt for record in records] == [[5]] * 3 + [[6]] * 3


async def test_a_stop_string_cancels_the_rest(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.answer = lambda _: LONG
    fleet.step_s = 0.005
    call = await gateway.open(ask(stops=("fox",)), "call", {})
    assert await texts(call) == ["the quick brown "]
    await ends_as(memory_store, "call", "cancelled", "stop")
    await until(lambda: fleet.cancels == ["call"])
    await until(lambda: fleet.outcomes["call"] == "terminal")
    assert call.choices[0].finish_reason == "stop"


async def test_one_choice_may_stop_while_another_goes_on(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.answer = lambda request: LONG if request.request_id == "call" else LONG.upper()
    fleet.step_s = 0.002
    call = await gateway.open(ask(n=2, stops=("fox",)), "call", {})
    assert await texts(call) == ["the quick brown ", LONG.upper()]
    await until(lambda: fleet.cancels == ["call"])
    record = (await memory_store.load(["call-1"]))[0]
    assert record is not None
    assert record.state == "done"


async def test_a_client_that_leaves_frees_its_slots(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.answer = lambda _: LONG
    fleet.step_s = 0.01
    call = await gateway.open(ask(n=2), "call", {})
    updates: AsyncIterator[Update | None] = call.updates()
    await anext(updates)
    call.close()
    assert gateway.n_open == 0
    await ends_as(memory_store, "call", "cancelled", "client disconnected")
    await ends_as(memory_store, "call-1", "cancelled", "client disconnected")
    assert sorted(fleet.cancels) == ["call", "call-1"]
    await until(lambda: set(fleet.outcomes.values()) == {"terminal"})
    steps = {r.step for r in await memory_store.load(["call", "call-1"]) if r is not None}
    assert max(steps) <= 3


async def test_leaving_while_waiting_for_admission(
    gateway: Gateway, memory_store: MemoryStore
) -> None:
    opening = asyncio.create_task(gateway.open(ask(), "call", {}))
    await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert gateway.n_open == 0
    await ends_as(memory_store, "call", "cancelled", "client disconnected")


async def test_cancelling_works_without_a_scheduler(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore, broker: MemoryBroker
) -> None:
    fleet.n_steps = 2
    call = await gateway.open(ask(), "call", {})
    await anext(call.updates())
    await fleet.bus.close()
    call.close()
    await ends_as(memory_store, "call", "cancelled", "client disconnected")


async def test_cancelling_waits_for_the_store(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 2
    call = await gateway.open(ask(), "call", {})
    memory_store.down = True
    call.close()
    await until(lambda: fleet.cancels == ["call"])
    memory_store.down = False
    await ends_as(memory_store, "call", "cancelled", "client disconnected")


async def test_a_failed_request_fails_the_call_and_its_siblings(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.answer = lambda _: LONG
    fleet.n_steps = 3
    call = await gateway.open(ask(n=2), "call", {})
    await memory_store.fail("call-1", term=1, error="its instance died three times")
    with pytest.raises(ApiError, match="its instance died three times") as caught:
        await texts(call)
    assert (caught.value.status, caught.value.kind) == (500, "server_error")
    assert "/v1/requests/call-1" in caught.value.message
    await ends_as(memory_store, "call", "cancelled", "another choice of the call failed")
    assert gateway.n_open == 0


async def test_a_request_that_somebody_else_cancelled(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 3
    call = await gateway.open(ask(), "call", {})
    await memory_store.cancel("call", reason="by the operator")
    with pytest.raises(ApiError, match="by the operator") as caught:
        await texts(call)
    assert caught.value.code == "request_cancelled"


async def test_a_lost_record_ends_the_call(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    empty = memory_store.snapshot()
    fleet.n_steps = 3
    call = await gateway.open(ask(), "call", {})
    await asyncio.sleep(0.02)
    memory_store.restore(empty)
    with pytest.raises(ApiError, match="record of request call is lost") as caught:
        await texts(call)
    assert caught.value.status == 503


async def test_streams_go_on_after_the_store_was_down(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.mangle = lose(1.0)
    fleet.step_s = 0.0
    call = await gateway.open(ask(), "call", {})
    await until(lambda: fleet.outcomes.get("call") == "committed")
    await asyncio.sleep(0.05)
    memory_store.down = True
    following = asyncio.create_task(texts(call))
    await asyncio.sleep(0.2)
    assert not following.done()
    memory_store.down = False
    assert await following == ["hello world"]


async def test_a_stream_that_lost_entries_is_settled_by_the_record(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.mangle = lose(1.0)
    call = await gateway.open(ask(), "call", {})
    await until(lambda: fleet.outcomes.get("call") == "committed")

    await ends_as(memory_store, "call", "done", "")
    data = memory_store.snapshot()
    del data.records["call"].deltas[2:4]
    memory_store.restore(data)
    assert await texts(call) == ["hello world"]


async def test_nothing_runs_on_after_a_refusal(
    gateway: Gateway, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    def refuse_third(submit: Submit) -> Refused | None:
        if submit.request_id != "call-2":
            return None
        return Refused(
            request_id=submit.request_id, reason="full", code="overloaded", retry_after_s=2
        )

    fleet.refuse = refuse_third
    fleet.n_steps = 1
    with pytest.raises(ApiError) as caught:
        await gateway.open(ask(n=4), "call", {})
    assert caught.value.status == 429
    assert gateway.n_open == 0
    admitted = {s.request_id for s in fleet.submits} - {"call-2"}
    await until(lambda: set(fleet.cancels) >= admitted)
    assert "call-2" not in fleet.cancels
    for record in await memory_store.load(sorted(admitted)):
        assert record is not None
        assert record.state == "cancelled"


async def test_strange_messages_are_dropped(
    gateway: Gateway, fleet: FakeFleet, broker: MemoryBroker, telemetry: Telemetry
) -> None:
    bus = MemoryBus(broker)
    subject = subjects.tokens(gateway.id)
    for data in (b"", b"\xff", b"{}", b'{"type":"other"}', b'{"type":"token_delta"}'):
        await bus.publish(subject, data)
    stray = TokenDelta(
        request_id="other",
        epoch=1,
        step=1,
        positions=[],
        tokens=[],
        confidences=[],
        kind="cache",
        threshold=0.9,
        worker="w",
    )
    await bus.publish(subject, encode(stray))
    call = await gateway.open(ask(), "call", {})
    assert await texts(call) == ["hello world"]
    text = telemetry.render()[0].decode()
    assert 'dilaserve:messages_dropped_total{reason="invalid"} 5.0' in text
    assert 'dilaserve:messages_dropped_total{reason="stale"} 1.0' in text


async def test_published_once_in_order_reads_nothing_from_the_store(
    gateway: Gateway, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    fleet.mangle = publish_last
    assert await texts(await gateway.open(ask(), "call", {})) == ["hello world"]
    assert reads(telemetry, "gap") == reads(telemetry, "silence") == 0


async def test_slow_steps_are_no_silence(
    gateway: Gateway, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    """At three times its usual interval a choice is silent: once that is known, not before."""
    fleet.step_s = 0.08  # longer than silence_s
    fleet.answer = lambda _: "0123456789012345678901"
    await texts(await gateway.open(ask(), "call", {}))
    assert reads(telemetry, "silence") <= 4
