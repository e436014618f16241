"""Each service emits what it declares, and a request that moves keeps its trace.

Both workers die once, after a commit and before they tell anyone: so requests are reassigned, the
gateway reads a silent stream from the store, and caches are rebuilt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from dilaserve import subjects
from dilaserve.bus.nats import connect_nats
from dilaserve.discovery import ServiceInfo, discover
from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack
from dilaserve.telemetry import METRICS

from .otlp import Collector, running_collector

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(__file__).parents[2] / "models/tiny"
SERVICES = ("gateway", "scheduler", "gpu-worker", "predictor")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shaken(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Stack, Collector]]:
    """A stack that served eight requests while both its workers died once under them."""
    options = StackOptions(
        home=tmp_path_factory.mktemp("stack"), model=MODEL, port=free_port(), n_workers=2
    )
    with running_collector() as collector:
        environ = {
            **os.environ,
            variable("otlp_endpoint"): collector.url,
            variable("crash_at"): "worker.after_commit:6",
            variable("record_dir"): str(options.home / "recorded"),
        }
        async with running_stack(options, environ=environ, log=print_line) as stack:
            await asyncio.gather(*(complete(stack, seed) for seed in range(8)))
            yield stack, collector


def print_line(name: str, line: str) -> None:
    print(f"{name}: {line}")


async def complete(stack: Stack, seed: int) -> None:
    body = {
        "model": "tiny",
        "prompt": "3 + 4 =",
        "max_tokens": 96,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "slo_ms": 60_000,
    }
    async with httpx.AsyncClient(base_url=stack.endpoints.gateway_url, timeout=90) as client:
        answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()


async def test_each_service_emits_what_it_declares(shaken: tuple[Stack, Collector]) -> None:
    stack, _ = shaken
    bus = await connect_nats(stack.endpoints.nats_url, name="test")
    try:
        services = await discover(bus)
        await publish_garbage(bus.publish, services)
        async with asyncio.timeout(20):
            while missing := await missing_metrics(services):
                print("not yet emitted:", missing)
                await asyncio.sleep(0.2)
    finally:
        await bus.close()


async def test_a_request_that_moves_keeps_its_trace(shaken: tuple[Stack, Collector]) -> None:
    _, collector = shaken
    # A worker may have died under the gateway's own probe; every request ends before its span does.
    await collector.wait_for(lambda: _moved(collector) and _moved(collector) <= _ended(collector))
    moves = collector.named("scheduler.reassign")
    for move in moves:
        (request,) = collector.named("gateway.request", trace_id=move.trace_id)
        assert move.parent_id == request.span_id
    works = [s for s in collector.named("worker.request") if s.attributes["dilaserve.epoch"] != 1]
    assert works
    assert {work.parent_id for work in works} <= {move.span_id for move in moves}


def _moved(collector: Collector) -> set[str]:
    return {span.trace_id for span in collector.named("scheduler.reassign")}


def _ended(collector: Collector) -> set[str]:
    return {span.trace_id for span in collector.named("gateway.request")}


async def publish_garbage(publish, services: list[ServiceInfo]) -> None:  # type: ignore[no-untyped-def]
    """One malformed message to each service, so that it counts one as dropped."""
    for service in services:
        service_id = service.metadata["id"]
        match service.name:
            case "gateway":
                await publish(subjects.tokens(service_id), b"{}")
            case "scheduler":
                await publish(subjects.event_step("nobody"), b"{}")
            case "gpu-worker":
                await publish(subjects.command_step(service_id), b"{}")
            case "predictor":
                await publish(subjects.PREDICT_STEPS, b"{}")


async def missing_metrics(services: list[ServiceInfo]) -> Mapping[str, set[str]]:
    """Metrics that a service declares and none of its processes shows."""
    shown: dict[str, set[str]] = {name: set() for name in SERVICES}
    async with httpx.AsyncClient(timeout=10) as client:
        for service in services:
            address = service.metadata["address"]
            url = address if address.startswith("http") else f"http://{address}"
            text = (await client.get(f"{url}/metrics")).text
            shown[service.name] |= {
                sample.name
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
    declared = {name: {m for m in METRICS.values() if name in m.services} for name in SERVICES}
    missing = {
        name: {m.name for m in metrics if not shown[name] & {m.name, f"{m.name}_count"}}
        for name, metrics in declared.items()
    }
    return {name: names for name, names in missing.items() if names}
