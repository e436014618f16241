"""`dilaserve ping`: the health check of a container whose service has no listener."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import typer

from dilaserve.commands.connect import bus_of_stack
from dilaserve.commands.options import NatsUrl
from dilaserve.discovery import ServiceInfo, discover

CONNECT_TIMEOUT_S = 3.0


def ping(
    service: Annotated[
        str, typer.Argument(help="gateway, scheduler, predictor, reconfigurator or gpu-worker.")
    ],
    here: Annotated[bool, typer.Option("--here", help="Only on this host.")] = False,
    nats_url: NatsUrl = None,
) -> None:
    """Ask whether a service answers on the bus.

    Exits with 0 if one of this name does, with 1 if none.
    """
    found = asyncio.run(_discover(nats_url, service))
    answering = [info for info in found if not here or info.metadata.get("host") == _here()]
    for info in answering:
        typer.echo(f"{info.name} {info.metadata.get('id', info.id)} answers")
    if not answering:
        where = f" on host {_here()}" if here else ""
        typer.echo(f"no {service} answers{where}; `dilaserve status` shows who does", err=True)
        raise typer.Exit(1)


async def _discover(url: str | None, service: str) -> list[ServiceInfo]:
    async with bus_of_stack(url, name="ping", timeout_s=CONNECT_TIMEOUT_S) as bus:
        return await discover(bus, service)


def _here() -> str:
    return socket.gethostname()
