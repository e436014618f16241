"""What clients ask of latency and quality reaches the thresholds; the answer says what was used.

The default policy on real workers, one of which dies under its requests, as does the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MODEL = Path(__file__).parents[2] / "models/tiny"
AMPLE_MS, HOPELESS_MS = 600_000, 1
BODY = {
    "model": "tiny",
    "prompt": "Running total of 3 1 4 1 5 9 2 6",
    "max_tokens": 96,
    "temperature": 1.0,
    "ignore_eos": True,
}
"""Noise makes the model unsure, so that the threshold matters at every step."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A worker dies after some commits, and the scheduler while it moves that one's requests."""
    home = tmp_path_factory.mktemp("stack")
    options = StackOptions(home=home, model=MODEL, port=free_port(), n_workers=2)
    crash_at = "worker-1=worker.after_commit:20,scheduler=scheduler.after_reassign:1"
    environ = {**os.environ, variable("crash_at"): crash_at}
    async with running_stack(options, environ=environ, log=print_line) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    url = stack.endpoints.gateway_url
    async with httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as client:
        yield client


def print_line(name: str, line: str) -> None:
    print(f"{name}: {line}")


async def complete(http: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request's report in its answer, and its record."""
    answer = (await http.post("/v1/completions", json=BODY | fields)).raise_for_status().json()
    record = (await http.get(f"/v1/requests/{answer['id']}")).raise_for_status().json()
    return answer["dilaserve"], record


def thresholds(record: dict[str, Any]) -> set[float]:
    return {step["threshold"] for step in record["steps"]}


async def test_the_report_outlives_a_worker_and_the_scheduler(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    runs = await asyncio.gather(*(complete(http, slo_ms=AMPLE_MS, seed=n) for n in range(8)))
    for report, record in runs:
        assert sum(report["steps"][kind] for kind in ("recompute", "cache")) == report["n_steps"]
        assert report["steps"]["recompute"] == 3
        assert report["n_steps"] == record["step"]
        assert facts(report) == facts(record["dilaserve"])
    assert [stack[name].n_restarts for name in ("worker-1", "scheduler")] == [1, 1]
    moved = [(report, record) for report, record in runs if report["migrations"]]
    assert moved, "no worker died, or it held nothing"
    for _, record in moved:
        assert record["epoch"] > 1
        steps = list(itertools.pairwise(record["steps"]))
        arrivals = [step for before, step in steps if step["worker"] != before["worker"]]
        assert all((step["kind"] == "cache") is step["rebuilt"] for step in arrivals)


async def test_with_time_to_spare_thresholds_stay_high(http: httpx.AsyncClient) -> None:
    report, record = await complete(http, slo_ms=AMPLE_MS, seed=1)
    assert thresholds(record) == {0.9}
    assert (report["mean_threshold"], report["slo_met"]) == (0.9, True)
    assert 0 < report["latency_ms"] < AMPLE_MS


async def test_an_slo_out_of_reach_lowers_them_down_to_the_floor(http: httpx.AsyncClient) -> None:
    report, record = await complete(http, slo_ms=HOPELESS_MS, seed=1)
    assert thresholds(record) == {0.5}
    assert (report["mean_threshold"], report["slo_met"]) == (0.5, False)
    floored, record = await complete(http, slo_ms=HOPELESS_MS, seed=1, min_confidence=0.75)
    assert min(thresholds(record)) >= 0.75
    assert floored["min_confidence"] == 0.75
    assert floored["n_steps"] > report["n_steps"]


async def test_the_tier_that_is_used_is_named(http: httpx.AsyncClient) -> None:
    report, record = await complete(http, service_tier="flex", max_tokens=32)
    assert (report["service_tier"], report["priority"]) == ("flex", -10)
    assert report["slo_ms"] == record["level"]["slo_ms"] == 120_000


async def test_a_stream_ends_with_it(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        request_id = answer.headers["x-request-id"]
    report = json.loads(lines[-1].removeprefix("data: "))["dilaserve"]
    record = (await http.get(f"/v1/requests/{request_id}")).json()
    assert facts(report) == facts(record["dilaserve"])
    assert record["dilaserve"]["latency_ms"] > 0


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on who measures it."""
    return {name: value for name, value in report.items() if name != "latency_ms"}
