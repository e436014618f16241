"""Questions to the step predictor, over a bus."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBus
from dilaserve.messages import (
    ConfidenceStats,
    PredictSteps,
    StepAnswer,
    StepQuestion,
    StepsPredicted,
    decode_to_predictor,
    encode,
)
from dilaserve_scheduler.core.events import Told
from dilaserve_scheduler.predicting import PredictorCalls

QUESTION = StepQuestion(
    request_id="r",
    step=4,
    n_output=64,
    block_length=32,
    n_unmasked=44,
    block=1,
    n_block_masked=20,
    confidence=ConfidenceStats(min=0.1, q25=0.2, median=0.5, mean=0.5, q75=0.8),
)
QUERY = PredictSteps(model_id="m", thresholds=[0.5, 0.9], questions=[QUESTION])
CARD = ServiceCard("predictor", "1", "", {"id": "p", "pid": "1", "address": ""})


async def ask(bus: MemoryBus, query: object) -> list[Told]:
    told: list[Told] = []
    async with asyncio.TaskGroup() as tasks:
        PredictorCalls(bus, tasks, answer=told.append).start(query)
    return told


def says(p50: list[float], upper: list[float], **changes: Any) -> StepsPredicted:
    each = StepAnswer(request_id="r", step=changes.pop("step", 4), p50=p50, upper=upper)
    values = {"model_id": "m", "thresholds": [0.5, 0.9], "answers": [each]} | changes
    return StepsPredicted(**values)


async def serve(bus: MemoryBus, answer: bytes) -> None:
    async def predict(message: BusMessage) -> bytes:
        assert decode_to_predictor(message.data) == QUERY
        return answer

    await bus.serve(CARD, [Endpoint("steps", subjects.PREDICT_STEPS, predict)])


async def test_an_answer_is_told() -> None:
    bus, answer = MemoryBus(), says([2.0, 3.0], [2.0, 4.5])
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


@pytest.mark.parametrize(
    "answer",
    [
        says([2.0], [2.0]),
        says([2.0, 3.0, 4.0], [2.0, 3.0]),
        says([], []),
        says([2.0, 3.0], [2.0, 3.0], step=3),
        says([2.0, 3.0], [2.0, 3.0], thresholds=[0.9, 0.5]),
        says([2.0, 3.0], [2.0, 3.0], model_id="another"),
    ],
)
async def test_an_answer_to_another_question_is_nonsense(
    answer: StepsPredicted, caplog: pytest.LogCaptureFixture
) -> None:
    bus = MemoryBus()
    await serve(bus, encode(answer))
    with caplog.at_level(logging.WARNING):
        assert await ask(bus, QUERY) == []
    assert "the step predictor answered nonsense" in caplog.text


async def test_no_more_steps_are_believed_than_there_are_masks() -> None:
    bus = MemoryBus()
    await serve(bus, encode(says([-3.0, 1e308], [0.0, 1e300])))
    assert await ask(bus, QUERY) == [Told(says([1.0, 20.0], [1.0, 20.0]))]


async def test_what_was_not_asked_is_left_out() -> None:
    bus, asked = MemoryBus(), says([2.0, 3.0], [2.0, 4.0])
    stranger = msgspec.structs.replace(asked.answers[0], request_id="stranger")
    await serve(bus, encode(msgspec.structs.replace(asked, answers=[stranger, *asked.answers])))
    assert await ask(bus, QUERY) == [Told(asked)]


async def test_a_predictor_that_wants_no_questions_is_asked_all_the_same() -> None:
    bus = MemoryBus()
    await serve(bus, encode(says([2.0, 3.0], [2.0, 4.0], refresh_tokens=2**40)))
    assert await ask(bus, QUERY) == [Told(says([2.0, 3.0], [2.0, 4.0], refresh_tokens=64))]


async def test_other_questions_go_nowhere() -> None:
    assert await ask(MemoryBus(), "how late is it?") == []
