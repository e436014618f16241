"""Whatever is sent, the answer is no 500, and every refusal has OpenAI's shape and a message."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.store.memory import MemoryStore
from dilaserve.telemetry import Telemetry
from dilaserve_gateway.app import create_app
from dilaserve_gateway.gateway import Clocks, Gateway
from dilaserve_gateway.model import ServedModel
from dilaserve_gateway.prompts import Prompter
from dilaserve_gateway.readiness import Probe
from dilaserve_gateway.settings import GatewaySettings
from dilaserve_gateway.testing import FakeFleet
from dilaserve_gateway.tiers import tiers_of

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/denoise")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
texts = st.text(max_size=20)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]) | values,
            "content": texts
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
            | values,
        }
    ),
    max_size=3,
)
prompts = (
    texts
    | st.lists(texts, max_size=3)
    | st.lists(st.integers(-2, 130), max_size=5)
    | st.lists(st.lists(st.integers(0, 130), max_size=3), max_size=3)
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("tiny") | values,
    "messages": messages | values,
    "prompt": prompts | values,
    "stream": st.booleans() | values,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | values,
    "stop": texts | st.lists(texts, max_size=5) | values,
    "n": st.integers(0, 4) | values,
    "seed": st.integers(-(2**64), 2**64) | values,
    "temperature": st.floats(-1, 3) | values,
    "top_p": st.floats(-1, 2) | values,
    "max_tokens": st.integers(-1, 2000) | values,
    "max_completion_tokens": st.integers(-1, 40) | values,
    "logprobs": st.booleans() | st.integers(-1, 6) | values,
    "top_logprobs": st.integers(-1, 3) | values,
    "ignore_eos": st.booleans() | values,
    "slo_ms": st.integers(-1, 5000) | values,
    "priority": st.integers(-5, 5) | values,
    "min_confidence": st.floats(-1, 2) | values,
    "service_tier": st.sampled_from(["auto", "flex"]) | values,
    "tools": values,
    "response_format": values,
    "best_of": st.integers(0, 3) | values,
    "echo": values,
}
bodies = st.fixed_dictionaries(
    {"model": st.just("tiny") | st.just("tiny") | values},
    optional={name: strategy for name, strategy in fields.items() if name != "model"},
)
sensible = st.fixed_dictionaries(
    {
        "model": st.just("tiny"),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": texts}),
            min_size=1,
            max_size=2,
        ),
        "prompt": texts.filter(bool),
    },
    optional={
        name: fields[name]
        for name in ("stream", "stop", "n", "seed", "temperature", "max_tokens", "ignore_eos")
    },
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def app(runner: asyncio.Runner, model: ServedModel) -> Iterator[FastAPI]:
    """One application for all examples."""
    broker, store, telemetry = MemoryBroker(), MemoryStore(), Telemetry.for_tests("gateway")
    gateway = Gateway(
        gateway_id="gateway-0000",
        model=model,
        bus=MemoryBus(broker),
        store=store,
        telemetry=telemetry,
        settings=GatewaySettings(model="tiny", max_choices=8),
        clocks=Clocks(monotonic=time.monotonic, wall=time.time),
    )
    prompter = Prompter(
        model,
        block_length=32,
        max_choices=8,
        tiers=tiers_of(gateway.settings),
        draw_seed=lambda: 1,
    )
    fleet = FakeFleet(MemoryBus(broker), store, model)
    runner.run(_start(gateway, fleet))
    yield create_app(gateway, prompter, Probe(gateway, time.monotonic))
    assert gateway.n_open == 0
    runner.run(_stop(gateway, fleet))
    telemetry.close()


async def _start(gateway: Gateway, fleet: FakeFleet) -> None:
    await gateway.start()
    await fleet.start()


async def _stop(gateway: Gateway, fleet: FakeFleet) -> None:
    await fleet.close()
    await gateway.close()


def post(runner: asyncio.Runner, app: FastAPI, path: str, **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **request)

    return runner.run(send())


def check(response: httpx.Response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code == 200:
        assert '"error"' not in response.text
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 20


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=bodies | values)
def test_any_json(runner: asyncio.Runner, app: FastAPI, path: str, body: Any) -> None:
    check(post(runner, app, path, json=body))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=sensible)
def test_bodies_that_are_nearly_right(
    runner: asyncio.Runner, app: FastAPI, path: str, body: dict[str, Any]
) -> None:
    if path == "/v1/denoise":
        del body["messages"]
    check(post(runner, app, path, json=body))


@settings(deadline=None, max_examples=100)
@given(path=st.sampled_from(PATHS), data=st.binary(max_size=60))
def test_any_bytes(runner: asyncio.Runner, app: FastAPI, path: str, data: bytes) -> None:
    check(post(runner, app, path, content=data))


HEADERS = ["x-slo-ms", "x-priority", "x-service-tier", "x-min-confidence", "traceparent"]


@settings(deadline=None, max_examples=100)
@given(
    body=sensible,
    cut=st.integers(0, 400),
    names=st.lists(st.sampled_from(HEADERS)),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
)
def test_any_headers_and_cuts(
    runner: asyncio.Runner,
    app: FastAPI,
    body: dict[str, Any],
    cut: int,
    names: list[str],
    value: str,
) -> None:
    headers = {name: value.strip().encode("latin-1") for name in names}
    data = json.dumps(body).encode()
    check(post(runner, app, "/v1/chat/completions", content=data[:cut] or data, headers=headers))
