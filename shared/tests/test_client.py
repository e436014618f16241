"""The CLI's client against a gateway that is played by a transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dilaserve.client import connect_gateway, model_ids, stream_chat, stream_events
from dilaserve.commands.canvas import MASK, WIDTH, Canvas
from dilaserve.errors import InvalidRequestError, UnavailableError


def gateway(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://g", transport=httpx.MockTransport(answer))


def sse(*events: object) -> str:
    return "".join(f"id: x\ndata: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def chunk(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


async def test_chat_yields_the_text_of_the_chunks() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        events = sse(
            chunk({"role": "assistant", "content": ""}), chunk({"content": "4"}), chunk({})
        )
        return httpx.Response(200, text=": keep-alive\n\n" + events)

    async with gateway(answer) as client:
        texts = [text async for text in stream_chat(client, {"model": "m"})]
    assert texts == ["4"]
    assert bodies == [{"model": "m", "stream": True}]


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidRequestError), (404, InvalidRequestError)]
    + [(status, UnavailableError) for status in (429, 500, 503)],
)
async def test_refusals_are_told_apart(status: int, error: type[Exception]) -> None:
    body = {"error": {"message": "because; do this", "type": "t", "param": None, "code": None}}
    async with gateway(lambda _: httpx.Response(status, json=body)) as client:
        with pytest.raises(error, match=f"answered {status}: because; do this"):
            [event async for event in stream_events(client, "/v1/denoise", {})]


async def test_error_in_another_shape_shows_the_status() -> None:
    async with gateway(lambda _: httpx.Response(502, text="<html>")) as client:
        with pytest.raises(UnavailableError, match="502: Bad Gateway"):
            await model_ids(client)


async def test_error_within_a_stream_is_raised() -> None:
    events = sse(chunk({"content": "4"}), {"error": {"message": "its instance died three times"}})
    async with gateway(lambda _: httpx.Response(200, text=events)) as client:
        with pytest.raises(UnavailableError, match="died three times"):
            [text async for text in stream_chat(client, {})]


async def test_gateway_that_is_not_there_says_how_to_start_one() -> None:
    with pytest.raises(UnavailableError, match="`dilaserve up`"):
        async with connect_gateway("http://127.0.0.1:9") as client:
            await model_ids(client)


def test_canvas_fills_out_of_order() -> None:
    canvas = Canvas(4)
    canvas.apply({"step": 1, "positions": [3, 1], "texts": ["d", "\n"]})
    assert canvas.draw().plain == f"{MASK}⏎{MASK}d"
    assert (canvas.n_tokens, canvas.n_steps) == (2, 1)
    canvas.apply({"step": 2, "positions": [0, 2], "texts": ["a", "c"]})
    assert canvas.draw().plain == "a⏎cd"


def test_canvas_shows_special_tokens_as_a_sign() -> None:
    canvas = Canvas(3)
    canvas.apply({"step": 1, "positions": [0, 1, 2], "texts": ["<", "<eos>", "<|im_end|>"]})
    assert canvas.draw().plain == "<··"


def test_canvas_grows_and_wraps() -> None:
    canvas = Canvas()
    canvas.apply({"step": 1, "positions": [WIDTH], "texts": ["x"]})
    assert canvas.draw().plain == MASK * WIDTH + "\nx"
