"""Open-loop load: sent when due, whatever became of the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from dilaserve_bench.live.load import Answer, Level, drive
from dilaserve_bench.twin.workload import Arrival

SLOW_S = 0.1


def arrival(number: int, at_s: float) -> Arrival:
    return Arrival(request_id=f"r{number}", at_s=at_s, n_prompt=1, n_output=1, case=number)


async def answer(request: httpx.Request) -> httpx.Response:
    number = json.loads(request.content)["number"]
    if number == 0:
        await asyncio.sleep(SLOW_S)
        return httpx.Response(200, json={"choices": [{"text": "first"}]})
    if number == 1:
        return httpx.Response(429, text="too much")
    if number == 2:
        return httpx.Response(500, text="broken")
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Events(number))


class Events(httpx.AsyncByteStream):
    """A stream of two pieces; that of request 4 fails after the first one."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'id: r:0\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        await asyncio.sleep(SLOW_S)
        yield b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n: silence\n\n'
        await asyncio.sleep(SLOW_S)
        if self._number == 4:
            yield b'data: {"error": {"message": "the instance died"}}\n\n'
            return
        if self._number == 5:
            raise httpx.ReadError("cut off")
        yield b'data: {"choices": [{"delta": {"content": " two"}}]}\n\n'
        yield (
            b'data: {"choices": [], "usage": {"completion_tokens": 2}, "dilaserve": {"n_steps": 3,'
            b' "mean_threshold": 0.75, "slo_met": true, "migrations": 1, "priority": 0}}\n\n'
        )
        if self._number != 6:
            yield b"data: [DONE]\n\n"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    real = httpx.AsyncClient

    def client(*, base_url: str, timeout: float, limits: httpx.Limits) -> httpx.AsyncClient:
        return real(base_url=base_url, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(httpx, "AsyncClient", client)


@pytest.mark.usefixtures("gateway")
async def test_nobody_waits_for_a_slow_one_and_every_end_is_told() -> None:
    workload = [arrival(0, 0.0), arrival(1, 0.01), arrival(2, 0.02)]
    answers = await drive(
        "http://gateway", workload, lambda each: {"number": each.case}, path="/v1/completions"
    )
    assert [each.request_id for each in answers] == ["r0", "r1", "r2"]
    assert [each.outcome for each in answers] == ["done", "refused", "failed"]
    assert [each.text for each in answers] == ["first", "too much", "broken"]
    assert answers[0].latency_s >= SLOW_S
    assert answers[2].ended_at < answers[0].ended_at
    assert all(each.sent_at >= each.due_at for each in answers)


@pytest.mark.usefixtures("gateway")
async def test_a_stream_tells_its_first_text_and_its_level() -> None:
    told: list[Answer] = []
    [answer] = await drive(
        "http://gateway",
        [arrival(3, 0.0)],
        lambda each: {"number": each.case, "stream": True},
        path="/v1/chat/completions",
        on_answer=told.append,
    )
    assert (answer.outcome, answer.text, answer.n_tokens) == ("done", "one two", 2)
    assert answer.level == Level(n_steps=3, mean_threshold=0.75, slo_met=True, migrations=1)
    assert answer.first_at is not None
    assert SLOW_S <= answer.first_at <= answer.ended_at - SLOW_S
    assert told == [answer]


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize(
    ("number", "text"), [(4, "the instance died"), (5, "cut off"), (6, "one two")]
)
async def test_a_stream_that_breaks_off_has_failed(number: int, text: str) -> None:
    [answer] = await drive(
        "http://gateway", [arrival(number, 0.0)], lambda each: {"number": each.case}, path="/v1/x"
    )
    assert (answer.outcome, answer.text) == ("failed", text)
