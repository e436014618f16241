"""The gateway's process: settings → model → bus and store → gateway → HTTP, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from dilaserve import __version__
from dilaserve.bus import ServiceCard
from dilaserve.bus.nats import connect_nats
from dilaserve.errors import BusUnavailableError, DiLaServeError
from dilaserve.settings import load
from dilaserve.store.redis import connect_redis
from dilaserve.telemetry import Telemetry
from dilaserve_gateway.app import create_app
from dilaserve_gateway.ask import SEED_LIMIT
from dilaserve_gateway.gateway import Clocks, Gateway
from dilaserve_gateway.listening import HttpServer, listen, url_of
from dilaserve_gateway.model import ServedModel, load_model
from dilaserve_gateway.prompts import Prompter
from dilaserve_gateway.readiness import Probe
from dilaserve_gateway.settings import GatewaySettings
from dilaserve_gateway.tiers import tiers_of

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENT_SHARE = 0.7
"""Of the time for a stop: what is open then is ended with an error, before it would be cut off."""


def main() -> None:
    """Serve until SIGTERM or SIGINT (exit code 0), or an error (1)."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = load(GatewaySettings, os.environ)
        model = load_model(Path(settings.model), settings.model_name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, model, listen(settings.host, settings.port)))
    except asyncio.CancelledError:
        return  # a stop signal before there was anything to finish
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-gateway: {error}\n")
        sys.exit(1)


async def _serve(settings: GatewaySettings, model: ServedModel, listener: socket.socket) -> None:
    gateway_id = f"gateway-{secrets.token_hex(2)}"
    task = asyncio.current_task()
    assert task is not None
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        telemetry = Telemetry.start(service="gateway", service_id=gateway_id, settings=settings)
        stack.callback(telemetry.close)
        for doubt in model.doubts:
            log.warning("%s", doubt)
        closed = asyncio.Event()
        bus = await connect_nats(
            settings.nats_url,
            name=gateway_id,
            start_timeout_s=settings.start_timeout_s,
            on_closed=closed.set,
        )
        stack.push_async_callback(bus.close)
        store = await connect_redis(settings.redis_url, start_timeout_s=settings.start_timeout_s)
        stack.push_async_callback(store.close)
        gateway = Gateway(
            gateway_id=gateway_id,
            model=model,
            bus=bus,
            store=store,
            telemetry=telemetry,
            settings=settings,
            clocks=Clocks(monotonic=time.monotonic, wall=time.time),
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        await bus.serve(_card(gateway_id, listener), [])
        log.info("serving %r at %s", model.id, url_of(listener))
        await _run(gateway, listener, closed)


async def _run(gateway: Gateway, listener: socket.socket, closed: asyncio.Event) -> None:
    """Serve HTTP and probe, until a stop signal or until NATS has closed for good."""
    prompter = Prompter(
        gateway.model,
        block_length=gateway.settings.block_length,
        max_choices=gateway.settings.max_choices,
        tiers=tiers_of(gateway.settings),
        draw_seed=lambda: secrets.randbelow(SEED_LIMIT),
    )
    probe = Probe(gateway, time.monotonic)
    app = create_app(gateway, prompter, probe)
    server = HttpServer(app, stop_timeout_s=gateway.settings.stop_timeout_s)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.stop()
        loop.call_later(PATIENT_SHARE * gateway.settings.stop_timeout_s, gateway.end_calls)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    probing = asyncio.create_task(probe.run())
    closing = asyncio.create_task(closed.wait())
    closing.add_done_callback(lambda _: stop())
    try:
        await server.serve([listener])
        if closed.is_set():
            raise BusUnavailableError("NATS closed the connection for good; see the log above")
    finally:
        for task in (probing, closing):
            task.cancel()
        await asyncio.gather(probing, closing, return_exceptions=True)


def _card(gateway_id: str, listener: socket.socket) -> ServiceCard:
    return ServiceCard(
        name="gateway",
        version=__version__,
        description="OpenAI-compatible REST in, server-sent events out",
        metadata={
            "id": gateway_id,
            "pid": str(os.getpid()),
            "address": url_of(listener),
            "host": socket.gethostname(),
        },
    )


if __name__ == "__main__":
    main()
