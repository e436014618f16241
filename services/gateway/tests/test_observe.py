"""What the gateway tells of its calls: spans under GenAI conventions, metrics by vLLM's names."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from dilaserve.messages import Refused
from dilaserve.store.memory import MemoryStore
from dilaserve.telemetry import METRICS, SPANS, Telemetry
from dilaserve.testing import until
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.gateway import Gateway
from dilaserve_gateway.testing import FakeFleet

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def only_span(telemetry: Telemetry) -> ReadableSpan:
    (span,) = telemetry.finished_spans()
    return span


def value(telemetry: Telemetry, sample: str) -> float:
    for line in telemetry.render()[0].decode().splitlines():
        if line.startswith(sample + " "):
            return float(line.split()[-1])
    return 0.0


async def test_a_span_of_a_call(
    http: httpx.AsyncClient, fleet: FakeFleet, telemetry: Telemetry, memory_store: MemoryStore
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = CHAT | {"seed": 3, "temperature": 0.5, "stop": ["x"], "max_tokens": 20, "n": 2}
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    span = only_span(telemetry)
    assert span.name == "gateway.request"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE
    attributes = dict(span.attributes or {})
    assert set(attributes) <= set(SPANS["gateway.request"].attributes)
    usage = answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "dilaserve.request_id": answer.json()["id"],
    }
    assert {name: attributes.get(name) for name in expected} == expected
    child = f"00-{TRACE}-{span.context.span_id:016x}-"
    assert all(sent["traceparent"].startswith(child) for sent in fleet.headers)
    record = (await memory_store.load([answer.json()["id"]]))[0]
    assert record is not None
    assert record.request.traceparent.startswith(child)


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-00", ""])
async def test_a_bad_parent_is_no_parent(
    http: httpx.AsyncClient, fleet: FakeFleet, telemetry: Telemetry, traceparent: str
) -> None:
    headers = {"traceparent": traceparent}
    assert (await http.post("/v1/chat/completions", json=CHAT, headers=headers)).is_success
    assert only_span(telemetry).parent is None


async def test_a_refused_call_is_an_error(
    http: httpx.AsyncClient, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    fleet.refuse = lambda submit: Refused(
        request_id=submit.request_id, reason="full", code="overloaded", retry_after_s=1
    )
    await http.post("/v1/chat/completions", json=CHAT)
    span = only_span(telemetry)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "ApiError"
    labels = '{finished_reason="error",model_name="tiny"}'
    assert value(telemetry, f"vllm:request_success_total{labels}") == 1
    assert value(telemetry, 'vllm:e2e_request_latency_seconds_count{model_name="tiny"}') == 0
    assert "dilaserve:slo_total{" not in telemetry.render()[0].decode()


async def test_metrics_of_calls(
    http: httpx.AsyncClient, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "n": 2}
    for extra in ({"slo_ms": 60_000}, {"slo_ms": 1}, {"max_tokens": 4}):
        fleet.step_s = 0.01
        await http.post("/v1/completions", json=body | extra)
    model = 'model_name="tiny"'
    stop, length = (f'{{finished_reason="{r}",{model}}}' for r in ("stop", "length"))
    assert value(telemetry, f"vllm:request_success_total{stop}") == 4
    assert value(telemetry, f"vllm:request_success_total{length}") == 2
    assert value(telemetry, f"vllm:prompt_tokens_total{{{model}}}") == 9
    assert value(telemetry, f"vllm:generation_tokens_total{{{model}}}") == 4 * 11 + 2 * 4
    assert value(telemetry, f"vllm:e2e_request_latency_seconds_count{{{model}}}") == 3
    assert value(telemetry, f"vllm:time_to_first_token_seconds_count{{{model}}}") == 3
    assert value(telemetry, f"vllm:request_generation_tokens_count{{{model}}}") == 6
    assert value(telemetry, f"vllm:request_params_n_sum{{{model}}}") == 6
    tier = 'service_tier="default"'
    assert value(telemetry, f'dilaserve:slo_total{{{model},outcome="met",{tier}}}') == 2
    assert value(telemetry, f'dilaserve:slo_total{{{model},outcome="missed",{tier}}}') == 1
    assert value(telemetry, f"dilaserve:request_threshold_count{{{model}}}") == 6
    assert value(telemetry, f"dilaserve:request_threshold_sum{{{model}}}") == pytest.approx(5.4)


async def test_an_admitted_call_that_fails_has_missed_its_slo(
    http: httpx.AsyncClient, fleet: FakeFleet, telemetry: Telemetry, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 1

    async def poison() -> None:
        await until(lambda: len(fleet.outcomes) == 1)
        await memory_store.fail(fleet.submits[0].request_id, term=1, error="poison")

    body = CHAT | {"service_tier": "flex"}
    answer, _ = await asyncio.gather(http.post("/v1/chat/completions", json=body), poison())
    assert answer.status_code == 500
    labels = '{model_name="tiny",outcome="missed",service_tier="flex"}'
    assert value(telemetry, f"dilaserve:slo_total{labels}") == 1


async def test_a_client_that_left_is_an_abort(
    gateway: Gateway, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    fleet.n_steps = 1
    ask = Ask("chat", ([5],), n_output=8, seed=0, block_length=32)
    call = await gateway.open(ask, "call", {})
    assert value(telemetry, "dilaserve:open_streams") == 1
    call.close()
    assert value(telemetry, "dilaserve:open_streams") == 0
    labels = '{finished_reason="abort",model_name="tiny"}'
    assert value(telemetry, f"vllm:request_success_total{labels}") == 1
    assert only_span(telemetry).status.status_code is StatusCode.UNSET


async def test_everything_declared_is_emitted(
    http: httpx.AsyncClient, gateway: Gateway, fleet: FakeFleet, telemetry: Telemetry
) -> None:
    def lose_every_other(deltas: list[Any]) -> list[Any]:
        return deltas[-1:] if len(deltas) % 2 == 0 else []

    fleet.mangle = lose_every_other
    fleet.step_s = 0.005
    await fleet.bus.publish("dlm.v1.tok.gateway-0000", b"{}")
    await http.post("/v1/chat/completions", json=CHAT | {"slo_ms": 1000})
    await http.get("/metrics")
    declared = {name for name, row in METRICS.items() if "gateway" in row.services}
    declared |= {name for name, row in SPANS.items() if "gateway" in row.services}
    assert declared - telemetry.emitted() == set()
    assert telemetry.emitted() - declared == set()
