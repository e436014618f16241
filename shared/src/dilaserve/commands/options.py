"""Options that several commands share."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dilaserve.addresses import find_addresses

NatsUrl = Annotated[
    str | None, typer.Option("--nats-url", help="NATS to talk to; default: that of the stack here.")
]
GatewayUrl = Annotated[
    str | None, typer.Option("--url", help="Gateway to talk to; default: that of the stack here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def nats_url_or_found(option: str | None) -> str:
    """The option, else what DILASERVE_NATS_URL or the running stack says."""
    return option or find_addresses(os.environ).nats_url


def gateway_url_or_found(option: str | None) -> str:
    """The option, else what DILASERVE_GATEWAY_URL or the running stack says."""
    return (option or find_addresses(os.environ).gateway_url).rstrip("/")
