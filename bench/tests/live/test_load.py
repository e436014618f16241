"""Open-loop load: sent when due, whatever became of the others."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from dilaserve_bench.live.load import drive
from dilaserve_bench.twin.workload import Arrival

SLOW_S = 0.3


def arrival(number: int, at_s: float) -> Arrival:
    return Arrival(request_id=f"r{number}", at_s=at_s, n_prompt=1, n_output=1, case=number)


async def answer(request: httpx.Request) -> httpx.Response:
    number = json.loads(request.content)["number"]
    if number == 0:
        await asyncio.sleep(SLOW_S)
        return httpx.Response(200, json={"choices": [{"text": "first"}]})
    if number == 1:
        return httpx.Response(429, text="too much")
    return httpx.Response(500, text="broken")


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
