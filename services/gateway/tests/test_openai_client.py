"""The official client works, streaming and not, sync and async, over real HTTP."""

from __future__ import annotations

import asyncio
import math
import random

import openai
import pytest

from dilaserve.messages import Refused, TokenDelta
from dilaserve.store.memory import MemoryStore
from dilaserve_gateway.testing import CONFIDENCE, FakeFleet

MESSAGES = [{"role": "user", "content": "say hello"}]
LOGPROB = math.log(CONFIDENCE)


@pytest.fixture
async def client(url: str, fleet: FakeFleet):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def sync_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_chat(client: openai.AsyncOpenAI, memory_store: MemoryStore) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=11)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("hello world")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len("hello world")
    assert answer._request_id == answer.id
    record = (await memory_store.load([answer.id]))[0]
    assert record is not None
    assert (record.state, record.request.spec.seed) == ("done", 11)


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == "hello world"
    assert len([delta for delta in deltas if delta]) > 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("hello world")
    assert len({chunk.id for chunk in chunks}) == 1


async def test_streams_survive_losses_repeats_and_reordering(
    client: openai.AsyncOpenAI, fleet: FakeFleet
) -> None:
    dice = random.Random(3)

    def rough(deltas: list[TokenDelta]) -> list[TokenDelta]:
        recent = deltas[-3:]
        dice.shuffle(recent)
        return [delta for delta in recent if dice.random() < 0.6]

    fleet.mangle = rough
    fleet.step_s = 0.002
    fleet.answer = lambda request: f"answer {request.spec.seed} of many, and not a short one"

    async def one(seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, seed=seed
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    answers = await asyncio.gather(*(one(seed) for seed in range(20)))
    assert answers == [f"answer {seed} of many, and not a short one" for seed in range(20)]


async def test_choices_interleave(client: openai.AsyncOpenAI, fleet: FakeFleet) -> None:
    fleet.answer = lambda request: f"this is {request.request_id[-2:]}"
    fleet.step_s = 0.002
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, stream=True, temperature=1
    )
    pieces: dict[int, str] = {}
    order = []
    async for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
            order.append(choice.index)
    assert [pieces[1], pieces[2]] == ["this is -1", "this is -2"]
    assert order != sorted(order)


async def test_choices_in_one_piece(client: openai.AsyncOpenAI, fleet: FakeFleet) -> None:
    fleet.answer = lambda request: f"this is {request.request_id[-2:]}"
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices][1:] == ["this is -1", "this is -2"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len("this is -1")


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "hello world"
    assert bytes(b for e in logprobs.content for b in e.bytes or []) == b"hello world"
    assert all(entry.logprob == pytest.approx(LOGPROB) for entry in logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, stream=True
    )
    tokens = [
        entry.token
        async for chunk in stream
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content
        for entry in chunk.choices[0].logprobs.content
    ]
    assert "".join(tokens) == "hello world"


async def test_completions(client: openai.AsyncOpenAI, fleet: FakeFleet) -> None:
    fleet.answer = lambda request: "ab" * len(request.prompt)
    answer = await client.completions.create(model="tiny", prompt=["x", "yz"], logprobs=0, n=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "abab", "abab"]
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "a", "b"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.token_logprobs == [pytest.approx(LOGPROB)] * 4
    assert logprobs.top_logprobs is None


async def test_completions_streamed(client: openai.AsyncOpenAI, fleet: FakeFleet) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        stream=True,
        max_tokens=4,
        logprobs=1,
        extra_body={"ignore_eos": True, "slo_ms": 800, "min_confidence": 0.7},
        extra_headers={"X-Priority": "4"},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hell"
    assert chunks[-1].choices[0].finish_reason == "length"
    offsets = [
        o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == [0, 1, 2, 3]
    submit = fleet.submits[-1]
    assert (submit.slo_ms, submit.priority, submit.min_confidence) == (800, 4, 0.7)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop(client: openai.AsyncOpenAI, fleet: FakeFleet, stream: bool) -> None:
    fleet.step_s = 0.001
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stop=["o w", "never"], stream=stream
    )
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in answer])
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    assert text == "hell"


async def test_the_synchronous_client(url: str, fleet: FakeFleet) -> None:
    def ask() -> tuple[str | None, str, list[str]]:
        with sync_client(url) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            models = [model.id for model in client.models.list()]
            assert client.models.retrieve("tiny").id == "tiny"
            return whole.choices[0].message.content, text, models

    assert await asyncio.to_thread(ask) == ("hello world", "hello world", ["tiny"])


async def test_errors_are_the_clients_exceptions(
    client: openai.AsyncOpenAI, fleet: FakeFleet
) -> None:
    with pytest.raises(openai.NotFoundError, match="use 'tiny'") as missing:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="context length") as long:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    fleet.refuse = lambda submit: Refused(
        request_id=submit.request_id, reason="full", code="overloaded", retry_after_s=7
    )
    with pytest.raises(openai.RateLimitError, match="overloaded") as full:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert full.value.response.headers["retry-after"] == "7"


async def test_a_failure_in_the_middle_of_a_stream(
    client: openai.AsyncOpenAI, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 2
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert chunk.choices[0].delta.content == "hell"
    await memory_store.fail(chunk.id, term=1, error="its instance died three times")
    with pytest.raises(openai.APIError, match="died three times"):
        await anext(stream)


async def test_a_failure_without_stream(
    client: openai.AsyncOpenAI, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 2
    asking = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES))
    while not fleet.outcomes:
        await asyncio.sleep(0.005)
    await memory_store.fail(fleet.submits[0].request_id, term=1, error="its instance died")
    with pytest.raises(openai.InternalServerError, match="its instance died"):
        await asking
