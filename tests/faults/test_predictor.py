"""The step predictor dies, or stands still, under twenty streams: none fails, and it is asked again
as soon as it is back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from dilaserve.bus.nats import connect_nats
from dilaserve.discovery import discover
from dilaserve.embedded import free_port
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack

from .streams import MODEL, N_STREAMS, stream_all

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

N_EVENTS = 60
"""Events of all streams together after which the predictor is killed; a run has far more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers under the policy that asks the predictor."""
    options = StackOptions(
        home=tmp_path_factory.mktemp("stack"),
        model=MODEL,
        port=free_port(),
        n_workers=2,
        threads=1,
        policy="dilaserve",
    )
    async with running_stack(options, environ=os.environ, log=print_line) as stack:
        await until_ready(stack)
        yield stack


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails."""
    print(f"{name}: {line}")


async def until_ready(stack: Stack) -> None:
    """Return once the predictor serves."""
    async with asyncio.timeout(60):
        while stack["predictor"].phase != "ready":
            await asyncio.sleep(0.01)


async def n_answered(stack: Stack) -> int:
    """Requests that the present process of the predictor has predicted."""
    bus = await connect_nats(stack.endpoints.nats_url, name="test")
    try:
        async with asyncio.timeout(20):
            while True:
                found = await discover(bus, "predictor")
                ours = [info for info in found if info.pid == stack["predictor"].pid]
                if ours:
                    break
    finally:
        await bus.close()
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{ours[0].metadata['address']}/metrics")).text
    match = re.search(r'^dilaserve:prediction_requests_total{outcome="answered"} (\S+)', text, re.M)
    return int(float(match.group(1))) if match else 0


async def test_it_is_asked(stack: Stack) -> None:
    before = await n_answered(stack)
    assert len(await stream_all(stack)) == N_STREAMS
    assert await n_answered(stack) > before


async def test_killed_it_costs_no_stream_and_is_asked_again(stack: Stack) -> None:
    victim = stack["predictor"]
    n_restarts, pid = victim.n_restarts, victim.pid
    streams = await stream_all(stack, n_events=N_EVENTS, then=lambda: victim.signal(signal.SIGKILL))
    assert len(streams) == N_STREAMS
    await until_ready(stack)
    assert (victim.n_restarts, victim.pid != pid) == (n_restarts + 1, True)
    assert len(await stream_all(stack)) == N_STREAMS
    assert await n_answered(stack) > 0


async def test_standing_still_it_costs_no_stream_and_is_asked_again(stack: Stack) -> None:
    before = await n_answered(stack)
    stack["predictor"].signal(signal.SIGSTOP)
    try:
        assert len(await stream_all(stack)) == N_STREAMS
    finally:
        stack["predictor"].signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        while await n_answered(stack) == before:
            await stream_all(stack)
