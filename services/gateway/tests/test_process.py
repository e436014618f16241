"""The gateway as a process, over real NATS and Valkey: starts, serves, and ends cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from dilaserve.bus.nats import connect_nats
from dilaserve.discovery import discover
from dilaserve.store.redis import connect_redis
from dilaserve_gateway.model import ServedModel
from dilaserve_gateway.testing import FakeFleet

TINY = Path(__file__).parents[3] / "models" / "tiny"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def gateway_process(**settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DILASERVE_")}
    named = {f"DILASERVE_{name.upper()}": value for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dilaserve_gateway"),
        env=inherited | {"DILASERVE_MODEL": str(TINY), "DILASERVE_PORT": "0"} | named,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(20):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


@pytest.fixture
async def real_fleet(nats_url: str, redis_url: str, model: ServedModel) -> AsyncIterator[FakeFleet]:
    """The scripted fleet over real servers."""
    async with AsyncExitStack() as stack:
        bus = await connect_nats(nats_url, name="fleet")
        stack.push_async_callback(bus.close)
        store = await connect_redis(redis_url)
        stack.push_async_callback(store.close)
        fleet = FakeFleet(bus, store, model)
        await fleet.start()
        stack.push_async_callback(fleet.close)
        yield fleet


async def address_of_gateway(fleet: FakeFleet) -> str:
    """As it announces it on the bus."""
    async with asyncio.timeout(20):
        while True:
            found = await discover(fleet.bus, "gateway", wait_s=0.1)
            if found:
                return found[0].metadata["address"]


async def wait_until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(
    fleet: FakeFleet, **settings: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    async with gateway_process(**settings) as process:
        url = await address_of_gateway(fleet)
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
            await wait_until_ready(http)
            yield process, http


async def test_serves_and_ends(real_fleet: FakeFleet, nats_url: str, redis_url: str) -> None:
    async with serving(real_fleet, nats_url=nats_url, redis_url=redis_url) as (process, http):
        (info,) = await discover(real_fleet.bus, "gateway")
        assert info.pid == process.pid
        assert info.metadata["id"] == (await http.get("/healthz")).json()["id"]
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "hello world"
        history = (await http.get(f"/v1/requests/{answer.json()['id']}")).json()
        assert len(history["steps"]) == 6
        process.send_signal(signal.SIGTERM)
        code, log = await outcome(process)
    assert code == 0, log
    assert "Traceback" not in log
    assert f"serving 'tiny' at {info.metadata['address']}" in log
    assert "ready: a request of one block took" in log


async def test_ends_with_a_stream_open(
    real_fleet: FakeFleet, nats_url: str, redis_url: str
) -> None:
    settings = {"nats_url": nats_url, "redis_url": redis_url, "stop_timeout_s": "1"}
    async with serving(real_fleet, **settings) as (process, http):
        real_fleet.n_steps = 2
        body = CHAT | {"stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            request_id = answer.headers["x-request-id"]
            process.send_signal(signal.SIGINT)
            text = (await answer.aread()).decode()
            code, log = await outcome(process)
    assert code == 0, log
    assert "this gateway is being stopped" in text
    assert text.endswith("data: [DONE]\n\n")
    record = (await real_fleet.store.load([request_id]))[0]
    assert record is not None
    assert (record.state, record.error) == ("cancelled", "gateway stopped")


async def test_ends_while_it_waits_for_nats(redis_url: str) -> None:
    async with gateway_process(nats_url="nats://127.0.0.1:1", redis_url=redis_url) as process:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"waiting for NATS" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGTERM)
        code, log = await outcome(process)
    assert (code, "Traceback" in log) == (0, False)


async def test_gives_up_without_nats(redis_url: str) -> None:
    settings = {"nats_url": "nats://127.0.0.1:1", "start_timeout_s": "0.3"}
    async with gateway_process(redis_url=redis_url, **settings) as process:
        code, log = await outcome(process)
    assert code == 1
    assert log.splitlines()[-1].startswith("dilaserve-gateway: no NATS server answers at nats:")
    assert "Traceback" not in log


async def test_says_which_setting_is_wrong(tmp_path: Path) -> None:
    async with gateway_process(model=str(tmp_path)) as process:
        code, log = await outcome(process)
    assert code == 1
    assert "config.json does not exist; set DILASERVE_MODEL" in log
    assert len(log.splitlines()) == 1
