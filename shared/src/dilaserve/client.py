"""A small client of the gateway for our own commands; others use OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from dilaserve.errors import InvalidRequestError, UnavailableError

__all__ = ["connect_gateway", "model_ids", "stream_chat", "stream_events", "text_of"]

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
DONE = "[DONE]"


@asynccontextmanager
async def connect_gateway(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the gateway at `url`. Raises UnavailableError when it is not there."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as client:
        try:
            yield client
        except httpx.TransportError as error:
            raise UnavailableError(
                f"the gateway at {url} does not answer ({error or type(error).__name__}); "
                "start a stack with `dilaserve up`, or give its address by --url"
            ) from error


async def model_ids(client: httpx.AsyncClient) -> list[str]:
    """Names of the models that the gateway serves."""
    response = await client.get("/v1/models")
    _raise_for_status(response)
    return [model["id"] for model in response.json()["data"]]


async def stream_chat(client: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[str]:
    """The text of a chat completion, piece by piece. Raises InvalidRequestError when the gateway
    refuses the request, UnavailableError when it cannot serve it now."""
    async for event in stream_events(client, "/v1/chat/completions", {**body, "stream": True}):
        if text := text_of(event):
            yield text


def text_of(event: Mapping[str, Any]) -> str:
    """The piece of text in an event of a chat completion."""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def stream_events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a streaming endpoint. Raises like `stream_chat`."""
    async with client.stream("POST", path, json=body) as response:
        if response.is_error:
            await response.aread()
        _raise_for_status(response)
        async for line in response.aiter_lines():
            name, _, value = line.partition(":")
            if name != "data" or value.strip() == DONE:
                continue
            event = json.loads(value)
            if "error" in event:
                raise UnavailableError(event["error"]["message"])
            yield event


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    message = _error_message(response)
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
        raise UnavailableError(message)
    raise InvalidRequestError(message)


def _error_message(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, else the status line."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    return f"{response.url} answered {response.status_code}: {message}"
