"""`python -m dilaserve_predictor` over a real NATS: served, stopped, refused, in a group."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.bus.nats import connect_nats
from dilaserve.discovery import ServiceInfo, discover
from dilaserve.messages import PredictSteps, decode_from_predictor, encode
from dilaserve.settings import variable
from dilaserve_predictor.model import StepModel

from .made_up import question_of, run_of

RUN = run_of(7, lambda _: 0.9, run_id="r")


@pytest_asyncio.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await connect_nats(nats_url, name="test")
    yield bus
    await bus.close()


@pytest.fixture
def environ(nats_url: str, trained: StepModel, tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "made-up"
    trained.save(folder / "predictor")
    return {
        **os.environ,
        variable("nats_url"): nats_url,
        variable("model"): str(folder),
        variable("metrics_port"): "0",
    }


@asynccontextmanager
async def process(environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilaserve_predictor", env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def registered(bus: Bus, pid: int) -> ServiceInfo:
    async with asyncio.timeout(20):
        while True:
            for info in await discover(bus, "predictor", wait_s=0.1):
                if info.pid == pid:
                    return info


async def ask(bus: Bus) -> int:
    query = PredictSteps(model_id="made-up", thresholds=[0.5, 0.9], questions=[question_of(RUN, 2)])
    reply = await bus.request(subjects.PREDICT_STEPS, encode(query), timeout_s=5)
    return len(decode_from_predictor(reply.data).answers)


async def test_it_serves_shows_its_metrics_and_stops(bus: Bus, environ: dict[str, str]) -> None:
    async with process(environ) as predictor:
        info = await registered(bus, predictor.pid)
        assert await ask(bus) == 1
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{info.metadata['address']}/metrics")).text
        assert 'dilaserve:prediction_requests_total{outcome="answered"} 1.0' in text
        predictor.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(predictor.communicate(), 5)
        assert predictor.returncode == 0
        assert b"predicting for made-up" in stderr
        assert b"Traceback" not in stderr


async def test_a_question_goes_to_one_of_two(bus: Bus, environ: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(process(environ)) for _ in range(2)]
        for each in both:
            await registered(bus, each.pid)
        assert [await ask(bus) for _ in range(40)] == [1] * 40
        stats = await bus.request_many("$SRV.STATS.predictor", b"", wait_s=0.5)
        counts = Counter(stat.data.partition(b'"num_requests":')[2][:2] for stat in stats)
        both[0].kill()
        await both[0].wait()
        assert [await ask(bus) for _ in range(5)] == [1] * 5
    assert len(stats) == 2
    assert b"0," not in counts, "both members take part"


async def test_it_waits_for_nats(environ: dict[str, str]) -> None:
    environ |= {variable("nats_url"): "nats://127.0.0.1:1", variable("start_timeout_s"): "0.2"}
    async with process(environ) as predictor:
        _, stderr = await asyncio.wait_for(predictor.communicate(), 20)
    assert predictor.returncode == 1
    assert b"dilaserve-predictor: " in stderr
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({variable("model_name"): "other"}, b"is for the model 'made-up', not for 'other'"),
        ({variable("record_mb"): "0"}, b"DILASERVE_RECORD_MB='0'"),
        ({variable("model"): ""}, b"DILASERVE_MODEL not set"),
    ],
)
async def test_what_cannot_be_served_is_said_in_a_line(
    environ: dict[str, str], change: dict[str, str], remedy: bytes
) -> None:
    async with process(environ | change) as predictor:
        _, stderr = await asyncio.wait_for(predictor.communicate(), 20)
    assert predictor.returncode == 1
    assert remedy in stderr
    assert b"Traceback" not in stderr
