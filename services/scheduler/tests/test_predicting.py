"""Questions to the step predictor, over a bus."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBus
from dilaserve.messages import PredictSteps, StepsPredicted, decode_to_predictor, encode
from dilaserve_scheduler.core.events import Told
from dilaserve_scheduler.predicting import PredictorCalls

QUERY = PredictSteps(model_id="m", thresholds=[0.9], questions=[])
CARD = ServiceCard("predictor", "1", "", {"id": "p", "pid": "1", "address": ""})


async def ask(bus: MemoryBus, query: object) -> list[Told]:
    told: list[Told] = []
    async with asyncio.TaskGroup() as tasks:
        PredictorCalls(bus, tasks, answer=told.append).start(query)
    return told


async def serve(bus: MemoryBus, answer: bytes) -> None:
    async def predict(message: BusMessage) -> bytes:
        assert decode_to_predictor(message.data) == QUERY
        return answer

    await bus.serve(CARD, [Endpoint("steps", subjects.PREDICT_STEPS, predict)])


async def test_an_answer_is_told() -> None:
    bus, answer = MemoryBus(), StepsPredicted(model_id="m", thresholds=[0.9], answers=[])
    await serve(bus, encode(answer))
    assert await ask(bus, QUERY) == [Told(answer)]


async def test_without_a_predictor_nothing_is_told() -> None:
    assert await ask(MemoryBus(), QUERY) == []


async def test_nonsense_is_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus()
    await serve(bus, b'{"type": "of the future"}')
    with caplog.at_level(logging.WARNING):
        assert await ask(bus, QUERY) == []
    assert "the step predictor answered nonsense" in caplog.text


async def test_other_questions_go_nowhere() -> None:
    assert await ask(MemoryBus(), "how late is it?") == []
