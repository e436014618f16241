"""A stream that meets a bug of ours still ends as streams end, and the error goes on to the log."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from dilaserve_gateway.choice import Choice, Update
from dilaserve_gateway.gateway import OpenCall
from dilaserve_gateway.sse import DONE
from dilaserve_gateway.streaming import stream_steps
from dilaserve_gateway.tokenizer import ModelTokenizer


class BrokenCall:
    """Raises where updates are expected."""

    id = "denoise-1"
    choices: tuple[Choice, ...] = ()

    async def updates(self) -> AsyncGenerator[Update | None, None]:
        """See OpenCall.updates."""
        yield None
        raise RuntimeError("a bug")


async def test_an_unexpected_error_is_told_and_raised() -> None:
    call, tokenizer = cast(OpenCall, BrokenCall()), cast(ModelTokenizer, None)
    head: dict[str, Any] = {"id": "denoise-1"}
    received: list[bytes] = []

    async def read() -> None:
        async for data in stream_steps(call, tokenizer, head, lambda: 0.0, 15.0):
            received.append(data)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(RuntimeError, match="a bug"):
        await read()
    assert received[-1] == DONE
    error = json.loads(received[-2].removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert error["message"]
