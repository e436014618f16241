"""`python -m dilaserve_scheduler` over real NATS and Valkey: served, killed, restarted, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from dilaserve.bus import Bus
from dilaserve.bus.nats import connect_nats
from dilaserve.discovery import ServiceInfo, discover
from dilaserve.messages import Admitted
from dilaserve.settings import variable
from dilaserve.store import Store
from dilaserve.store.redis import connect_redis

from .fakes import running_worker, submit, wait_ended, write


@pytest_asyncio.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await connect_nats(nats_url, name="test")
    yield bus
    await bus.close()


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = await connect_redis(redis_url)
    yield store
    await store.close()


@pytest.fixture
def environ(nats_url: str, redis_url: str) -> dict[str, str]:
    return {
        **os.environ,
        variable("nats_url"): nats_url,
        variable("redis_url"): redis_url,
        variable("metrics_port"): "0",
    }


@asynccontextmanager
async def scheduler(environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilaserve_scheduler", env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def leader(bus: Bus, pid: int) -> ServiceInfo:
    async with asyncio.timeout(30.0):
        while True:
            for info in await discover(bus, "scheduler", wait_s=0.1):
                if info.pid == pid and info.metadata["role"] == "leader":
                    return info


async def test_killed_and_restarted_it_goes_on_where_it_was(
    bus: Bus, store: Store, environ: dict[str, str]
) -> None:
    async with running_worker(bus, store, "a-0001") as worker:
        worker.step_s = 0.5
        async with scheduler(environ) as first:
            assert (await leader(bus, first.pid)).metadata["address"]
            await write(store, "r", arrival_s=time.time())
            assert isinstance(await submit(bus, "r", arrival_s=time.time()), Admitted)
            first.kill()
            await first.wait()
        async with scheduler(environ) as second:
            await leader(bus, second.pid)
            assert await wait_ended(store, "r") == "done"
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), 5.0) == 0
        assert await store.take_lease("next", ttl_s=1.0) == 3  # released, not run out
    (record,) = await store.load(["r"])
    assert record is not None
    assert (record.epoch, record.attempts) == (1, 0)


@pytest.mark.parametrize(
    ("point", "epoch"), [("scheduler.after_admit", 1), ("scheduler.after_reassign", 2)]
)
async def test_it_dies_where_it_is_told_to(
    bus: Bus, store: Store, environ: dict[str, str], point: str, epoch: int
) -> None:
    armed = {**environ, variable("crash_at"): f"{point}:1"}
    async with running_worker(bus, store, "a-0001") as first, scheduler(armed) as process:
        first.step_s = 60.0
        await leader(bus, process.pid)
        await write(store, "r", arrival_s=time.time())
        asking = asyncio.create_task(submit(bus, "r", arrival_s=time.time(), timeout_s=2.0))
        if epoch == 2:
            await asking
            first.mute = True
            async with running_worker(bus, store, "a-0002"):
                await asyncio.wait_for(process.wait(), 10.0)
        else:
            await asyncio.wait_for(process.wait(), 10.0)
        asking.cancel()
        assert process.returncode == -signal.SIGKILL
        (record,) = await store.load(["r"])
        assert record is not None
        assert (record.state, record.epoch) == ("active", epoch)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("policy", "best", "DILASERVE_POLICY='best' is no policy"),
        ("run_ahead", "0", "DILASERVE_RUN_AHEAD='0'"),
        ("nats_url", "nats://127.0.0.1:1", "no NATS server answers"),
        ("crash_at", "nowhere", "DILASERVE_CRASH_AT='nowhere'"),
    ],
)
async def test_a_wrong_start_is_one_line_and_exit_code_1(
    environ: dict[str, str], name: str, value: str, message: str
) -> None:
    wrong = {**environ, variable(name): value, variable("start_timeout_s"): "0.5"}
    async with scheduler(wrong) as process:
        assert process.stderr is not None
        text = (await asyncio.wait_for(process.stderr.read(), 30.0)).decode()
        assert await process.wait() == 1
    assert message in text.splitlines()[-1]
    assert "Traceback" not in text


async def test_its_log_begins_with_the_profile_and_warns_of_another_model(
    bus: Bus, store: Store, environ: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        '{"model": "other", "device": "H100", '
        '"profiles": [{"tp_degree": 1, "points": [[32, 0.01]]}]}'
    )
    profiled = {**environ, variable("profile"): str(path)}
    lines: list[str] = []
    async with running_worker(bus, store, "a-0001"), scheduler(profiled) as process:
        assert process.stderr is not None
        async with asyncio.timeout(30.0):
            while not lines or "serves 'm'" not in lines[-1]:
                lines.append((await process.stderr.readline()).decode())
    assert f"latency profile {path}: other on H100, TP degrees 1, step kinds not" in lines[0]
    assert "WARNING" in lines[-1]
    assert "the latency profile is of 'other'" in lines[-1]
