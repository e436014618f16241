"""One trace per request, through three real processes and over real NATS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack
from dilaserve.telemetry import SPANS

from .otlp import CollectedSpan, Collector, running_collector

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(__file__).parents[2] / "models/tiny"
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Stack, Collector]]:
    """A stack with one worker whose processes export to the collector."""
    options = StackOptions(home=tmp_path_factory.mktemp("stack"), model=MODEL, port=free_port())
    with running_collector() as collector:
        environ = {**os.environ, variable("otlp_endpoint"): collector.url}
        async with running_stack(options, environ=environ, log=print_line) as stack:
            yield stack, collector


def print_line(name: str, line: str) -> None:
    print(f"{name}: {line}")


async def complete(
    stack: Stack, *, n_tokens: int = 64, headers: dict[str, str] | None = None
) -> str:
    """The id of a request that was served."""
    body = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": n_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.endpoints.gateway_url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    answer.raise_for_status()
    return str(answer.json()["id"])


async def spans_of(collector: Collector, request_id: str) -> dict[str, CollectedSpan]:
    """The request's spans by name, as soon as the three of a request's path have arrived.

    Of its first epoch only: on a starved machine a live worker may be taken for dead.
    """

    def found() -> dict[str, CollectedSpan]:
        return {
            s.name: s
            for s in collector.spans
            if s.attributes.get("dilaserve.request_id") == request_id
            and s.attributes.get("dilaserve.epoch", 1) == 1
        }

    path = {"gateway.request", "scheduler.admit", "worker.request"}
    await collector.wait_for(lambda: path <= set(found()))
    return found()


async def test_a_request_is_one_trace_from_the_client_to_the_worker(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    request_id = await complete(
        stack, headers={"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    )

    spans = await spans_of(collector, request_id)
    request, admit, work = (
        spans[name] for name in ("gateway.request", "scheduler.admit", "worker.request")
    )

    assert {s.trace_id for s in spans.values()} == {CLIENT_TRACE}
    assert request.parent_id == CLIENT_SPAN
    assert admit.parent_id == request.span_id
    assert work.parent_id == admit.span_id
    assert [s.service for s in (request, admit, work)] == [
        "dilaserve-gateway",
        "dilaserve-scheduler",
        "dilaserve-gpu-worker",
    ]
    assert len({s.service_id for s in (request, admit, work)}) == 3
    for once in ("gateway.request", "scheduler.admit"):
        assert len(collector.named(once, trace_id=CLIENT_TRACE)) == 1
    assert admit.attributes["dilaserve.instance_id"] == work.service_id
    assert request.attributes["gen_ai.usage.output_tokens"] == 64
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_each_step_links_to_the_requests_of_its_batch(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    ids = await asyncio.gather(*(complete(stack, n_tokens=96) for _ in range(4)))
    works = [(await spans_of(collector, request_id))["worker.request"] for request_id in ids]

    def steps_of(work: CollectedSpan) -> list[CollectedSpan]:
        return [s for s in collector.named("worker.step") if work.span_id in s.links]

    await collector.wait_for(lambda: all(steps_of(work) for work in works))

    for work in works:
        n_steps = work.attributes["dilaserve.steps"]
        assert isinstance(n_steps, int)
        assert n_steps >= 3, "96 tokens are three blocks"
        assert len(steps_of(work)) >= n_steps
    batches = [s for s in collector.named("worker.step") if len(s.links) > 1]
    assert batches, "four requests at once never shared a pass"
    for step in collector.named("worker.step"):
        assert step.parent_id == "", "a batch has no one parent"
        assert step.trace_id not in {work.trace_id for work in works}


async def test_without_a_traceparent_each_request_starts_a_trace(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    ids = [await complete(stack), await complete(stack)]

    requests = [(await spans_of(collector, i))["gateway.request"] for i in ids]

    assert [request.parent_id for request in requests] == ["", ""]
    assert requests[0].trace_id != requests[1].trace_id


async def test_a_client_that_is_not_sampled_is_not_traced(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    trace_id = "11111111111111111111111111111111"
    await complete(stack, headers={"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-00"})
    later = await complete(stack)

    await spans_of(collector, later)

    assert [s for s in collector.spans if s.trace_id == trace_id] == []


async def test_spans_carry_declared_names_and_attributes(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    await spans_of(collector, await complete(stack))

    for span in collector.spans:
        declared = SPANS[span.name]
        assert span.service.removeprefix("dilaserve-") in declared.services
        assert set(span.attributes) <= set(declared.attributes), span.name
