"""A gateway in memory before a scripted fleet, as objects and on real HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.store.memory import MemoryStore
from dilaserve.telemetry import Telemetry
from dilaserve_gateway.app import create_app
from dilaserve_gateway.gateway import Clocks, Gateway
from dilaserve_gateway.model import ServedModel, load_model
from dilaserve_gateway.prompts import Prompter
from dilaserve_gateway.readiness import Probe
from dilaserve_gateway.settings import GatewaySettings
from dilaserve_gateway.testing import FakeFleet, serve_app
from dilaserve_gateway.tiers import tiers_of

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(scope="session")
def model() -> ServedModel:
    """The bundled model's tokenizer and limits."""
    return load_model(TINY)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry.for_tests("gateway")
    yield telemetry
    telemetry.close()


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(
        model=str(TINY), silence_s=0.05, admission_timeout_s=1.0, stop_timeout_s=1.0
    )


@pytest.fixture
async def fleet(
    broker: MemoryBroker, memory_store: MemoryStore, model: ServedModel
) -> AsyncIterator[FakeFleet]:
    fleet = FakeFleet(MemoryBus(broker), memory_store, model)
    await fleet.start()
    yield fleet
    await fleet.close()


@pytest.fixture
async def gateway(
    broker: MemoryBroker,
    memory_store: MemoryStore,
    telemetry: Telemetry,
    model: ServedModel,
    settings: GatewaySettings,
) -> AsyncIterator[Gateway]:
    gateway = Gateway(
        gateway_id="gateway-0000",
        model=model,
        bus=MemoryBus(broker),
        store=memory_store,
        telemetry=telemetry,
        settings=settings,
        clocks=Clocks(monotonic=time.monotonic, wall=time.time),
    )
    await gateway.start()
    yield gateway
    await gateway.close()


@pytest.fixture
def probe(gateway: Gateway) -> Probe:
    return Probe(gateway, time.monotonic)


@pytest.fixture
def app(gateway: Gateway, probe: Probe) -> FastAPI:
    prompter = Prompter(
        gateway.model,
        block_length=gateway.settings.block_length,
        max_choices=gateway.settings.max_choices,
        tiers=tiers_of(gateway.settings),
        draw_seed=lambda: 4242,
    )
    return create_app(gateway, prompter, probe)


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    """The gateway on a real HTTP server."""
    async with serve_app(app) as url:
        yield url


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
        yield client
