"""The endpoints beside OpenAI's, headers, limits, and what happens to bad requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from dilaserve.messages import TokenDelta
from dilaserve.store.memory import MemoryStore
from dilaserve.testing import until
from dilaserve_gateway.gateway import Gateway
from dilaserve_gateway.readiness import Probe
from dilaserve_gateway.testing import WORKER, FakeFleet

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any] | str]]:
    """(id, data) of each event; comments as ("", text)."""
    event_id = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, value if value == "[DONE]" else json.loads(value)
            event_id = ""
        elif line.startswith(":"):
            yield "", value


async def post_stream(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[httpx.Headers, list[tuple[str, Any]]]:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return response.headers, [event async for event in events(response)]


async def test_answers_carry_id_and_seed(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | {"max_token": 3})
    assert answer.headers["x-request-id"] == answer.json()["id"] == fleet.submits[0].request_id
    assert answer.headers["x-seed"] == "4242"
    assert answer.headers["x-ignored-fields"] == "max_token"
    assert answer.headers["content-type"] == "application/json"
    again = await http.post("/v1/chat/completions", json=CHAT | {"seed": 5, "service_tier": "auto"})
    assert again.headers["x-seed"] == "5"
    assert "x-ignored-fields" not in again.headers
    assert again.json()["service_tier"] == "default"


async def test_event_ids_rise(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    headers, stream = await post_stream(http, "/v1/chat/completions", CHAT | {"stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    request_id = headers["x-request-id"]
    ids = [event_id for event_id, data in stream if data != "[DONE]"]
    assert all(event_id.startswith(f"{request_id}:") for event_id in ids)
    steps = [int(event_id.rpartition(":")[2]) for event_id in ids]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 6)
    assert stream[-1] == ("", "[DONE]")


async def test_silent_streams_are_kept_alive(
    gateway: Gateway, app: FastAPI, http: httpx.AsyncClient, fleet: FakeFleet
) -> None:
    gateway.settings = msgspec.structs.replace(gateway.settings, keepalive_s=0.1)
    fleet.n_steps = 1
    async with http.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as answer:
        async for event in events(answer):
            assert event == ("", "keep-alive")
            break
    await until(lambda: len(fleet.cancels) == 1)


async def test_the_raw_stream(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.mangle = lambda deltas: [*deltas, deltas[0]] if len(deltas) % 2 else []
    headers, stream = await post_stream(http, "/v1/denoise", CHAT | {"max_tokens": 20})
    data = [event for _, event in stream]
    start, steps, end = data[0], data[1:-2], data[-2]
    assert start["object"] == "denoise.start"
    assert start["id"] == headers["x-request-id"]
    assert (start["n_output"], start["block_length"], start["seed"]) == (20, 32, 4242)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["positions"] == [2, 3]
    assert steps[0]["texts"] == ["l", "l"]
    canvas: dict[int, str] = {}
    for step in steps:
        assert not set(step["positions"]) & set(canvas)
        canvas |= dict(zip(step["positions"], step["texts"], strict=True))
        assert len(step["confidences"]) == len(step["tokens"]) == len(step["positions"])
    assert [canvas[p] for p in range(12)] == [*"hello world", "<eos>"]
    assert end["object"] == "denoise.end"
    assert (end["text"], end["finish_reason"]) == ("hello world", "stop")
    assert end["usage"]["completion_tokens"] == 11
    assert data[-1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/denoise", "/v1/chat/completions"])
async def test_a_failure_is_an_event(
    http: httpx.AsyncClient, fleet: FakeFleet, memory_store: MemoryStore, path: str
) -> None:
    fleet.n_steps = 2
    async with http.stream("POST", path, json=CHAT | {"stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        await until(lambda: fleet.outcomes.get(request_id) == "committed")
        await memory_store.fail(request_id, term=1, error="poison")
        data = [event async for _, event in events(answer)]
    assert data[-2]["error"]["message"].count("poison") == 1  # type: ignore[index]
    assert data[-2]["error"]["type"] == "server_error"  # type: ignore[index]
    assert data[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION | {"n": 2}),
        ("/v1/denoise", COMPLETION),
    ],
)
async def test_a_client_that_disconnects_frees_its_slot(
    http: httpx.AsyncClient,
    gateway: Gateway,
    fleet: FakeFleet,
    memory_store: MemoryStore,
    path: str,
    body: dict[str, Any],
) -> None:
    fleet.answer = lambda _: "a long answer that takes its time to come"
    fleet.step_s = 0.02
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await http.post(path, json=body)
    await until(lambda: set(fleet.outcomes.values()) == {"terminal"})
    ids = [submit.request_id for submit in fleet.submits]
    assert sorted(fleet.cancels) == sorted(ids)
    for record in await memory_store.load(ids):
        assert record is not None
        assert (record.state, record.error) == ("cancelled", "client disconnected")
        assert 0 < record.step < 15
    assert gateway.n_open == 0


async def test_a_client_that_disconnects_before_admission(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/chat/completions", json=CHAT, timeout=0.1)
    await until(lambda: gateway.n_open == 0)


async def test_history(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    answer = await http.post("/v1/completions", json=COMPLETION | {"slo_ms": 900})
    history = (await http.get(f"/v1/requests/{answer.json()['id']}")).json()
    assert (history["state"], history["finish_reason"]) == ("done", "stop")
    assert history["text"] == "hello world"
    assert history["canvas"][12] is None
    assert history["spec"]["seed"] == 4242
    assert history["level"]["slo_ms"] == 900
    assert [step["step"] for step in history["steps"]] == [1, 2, 3, 4, 5, 6]
    first = history["steps"][0]
    assert (first["worker"], first["epoch"], first["threshold"]) == (WORKER, 1, 0.9)
    assert (first["kind"], first["latency_ms"]) == ("recompute", 1.5)
    assert (first["positions"], first["texts"]) == ([2, 3], ["l", "l"])


@pytest.mark.parametrize("request_id", ["nothing", "a b", "%00", "ü", "x" * 5000, "a*b", "{x}"])
async def test_history_of_nothing(http: httpx.AsyncClient, request_id: str) -> None:
    answer = await http.get(f"/v1/requests/{request_id}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert (await http.get("/v1/models/tiny")).json() == listed["data"][0]
    missing = await http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_health(http: httpx.AsyncClient, gateway: Gateway) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok", "id": gateway.id}


async def test_ready_after_a_real_request(
    http: httpx.AsyncClient, fleet: FakeFleet, probe: Probe, memory_store: MemoryStore
) -> None:
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    await probe.run()
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reason": None})
    record = (await memory_store.load([fleet.submits[0].request_id]))[0]
    assert record is not None
    assert (record.state, record.request.spec.n_output) == ("done", 32)
    memory_store.down = True
    answer = await http.get("/readyz")
    assert answer.status_code == 503
    assert "store does not answer" in answer.json()["reason"]


async def test_the_probe_tries_until_it_succeeds(
    http: httpx.AsyncClient, fleet: FakeFleet, probe: Probe, memory_store: MemoryStore
) -> None:
    memory_store.down = True
    probing = asyncio.create_task(probe.run())
    await asyncio.sleep(0.05)
    assert "store is down" in (await http.get("/readyz")).json()["reason"]
    memory_store.down = False
    async with asyncio.timeout(5):
        await probing
    assert (await http.get("/readyz")).status_code == 200


async def test_the_playground_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/denoise" in page.text
    for reference in ("http:", "https:", "src=", "url(", "@import", "//"):
        assert reference not in page.text


async def test_the_api_describes_its_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in (
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/v1/denoise", "DenoiseBody"),
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith(f"/{name}")
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/chat", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_no_such_endpoint(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


async def test_large_bodies(http: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.settings = msgspec.structs.replace(gateway.settings, max_body_bytes=10_000)
    declared = await http.post("/v1/completions", json=COMPLETION | {"user": "x" * 20_000})
    assert declared.status_code == 413
    assert "larger than 10000 bytes; send a shorter prompt" in declared.json()["error"]["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    undeclared = await http.post("/v1/completions", content=chunks())
    assert undeclared.status_code == 413


async def test_metrics_name_routes_and_codes(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    await http.post("/v1/chat/completions", json=CHAT | {"model": "x"})
    await http.get("/v1/requests/abc")
    await http.get("/secret/path")
    text = (await http.get("/metrics")).text
    for route, code in (
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions", 404),
        ("/v1/requests/{request_id}", 404),
        ("other", 404),
    ):
        assert f'dilaserve:http_requests_total{{code="{code}",route="{route}"}} 1.0' in text


async def test_an_error_of_ours_is_a_500_in_shape(
    http: httpx.AsyncClient, fleet: FakeFleet, memory_store: MemoryStore, monkeypatch: Any
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(memory_store, "load", broken)
    answer = await http.get("/v1/requests/abc")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a bug" not in answer.text


async def test_a_store_that_is_down_is_a_503(
    http: httpx.AsyncClient, memory_store: MemoryStore
) -> None:
    memory_store.down = True
    for answer in (
        await http.get("/v1/requests/abc"),
        await http.post("/v1/chat/completions", json=CHAT),
    ):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["error"]["code"] == "unavailable"


async def test_late_deltas_of_a_closed_stream_are_dropped(
    http: httpx.AsyncClient, fleet: FakeFleet
) -> None:
    late: list[TokenDelta] = []

    def keep(deltas: list[TokenDelta]) -> list[TokenDelta]:
        late.extend(deltas[-1:])
        return [*deltas[-1:], *late]

    fleet.mangle = keep
    for _ in range(3):
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "hello world"
