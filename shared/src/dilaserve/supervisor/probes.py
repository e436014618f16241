"""How the supervisor knows that a child serves. Each probe takes the child's process id."""

from __future__ import annotations

import httpx

from dilaserve.bus import Bus
from dilaserve.discovery import discover
from dilaserve.embedded import nats_answers, valkey_answers
from dilaserve.errors import BusUnavailableError
from dilaserve.supervisor.child import Probe

DISCOVERY_WAIT_S = 0.2
HTTP_TIMEOUT_S = 2.0


def nats_probe(port: int) -> Probe:
    """NATS greets on its port."""

    async def probe(_pid: int) -> bool:
        return await nats_answers(port)

    return probe


def valkey_probe(port: int) -> Probe:
    """Valkey has loaded its data and takes commands."""

    async def probe(_pid: int) -> bool:
        return await valkey_answers(port)

    return probe


def service_probe(bus: Bus, service: str) -> Probe:
    """The very process has registered on the bus."""

    async def probe(pid: int) -> bool:
        try:
            found = await discover(bus, service, wait_s=DISCOVERY_WAIT_S)
        except BusUnavailableError:
            return False
        return any(info.pid == pid for info in found)

    return probe


def http_probe(url: str) -> Probe:
    """`url` answers 200."""

    async def probe(_pid: int) -> bool:
        try:
            async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return probe
