"""`dilaserve ping`: the health check of a container whose service has no listener."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import typer

from dilaserve.bus.nats import connect_nats
from dilaserve.commands.options import NatsUrl, nats_url_or_found
from dilaserve.discovery import ServiceInfo, discover

CONNECT_TIMEOUT_S = 3.0


def ping(
    service: Annotated[str, typer.Argument(help="gateway, scheduler or gpu-worker.")],
    here: Annotated[bool, typer.Option("--here", help="Only on this host.")] = False,
    nats_url: NatsUrl = None,
) -> None:
    """Ask whether a service answers on the bus.

    Exits with 0 if one of this name does, with 1 if none.
    """
    found = asyncio.run(_discover(nats_url_or_found(nats_url), service))
    answering = [info for info in found if not here or info.metadata.get("host") == _here()]
    for info in answering:
        typer.echo(f"{info.name} {info.metadata.get('id', info.id)} answers")
    if not answering:
        where = f" on host {_here()}" if here else ""
        typer.echo(f"no {service} answers{where}; `dilaserve status` shows who does", err=True)
        raise typer.Exit(1)


async def _discover(url: str, service: str) -> list[ServiceInfo]:
    bus = await connect_nats(url, name="ping", start_timeout_s=CONNECT_TIMEOUT_S)
    try:
        return await discover(bus, service)
    finally:
        await bus.close()


def _here() -> str:
    return socket.gethostname()
