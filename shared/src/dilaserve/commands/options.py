"""Options that several commands share."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
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


def gateway_url_or_found(option: str | None) -> str:
    """The option, else what DILASERVE_GATEWAY_URL or the running stack says."""
    return (option or find_addresses(os.environ).gateway_url).rstrip("/")


def command_name() -> str:
    """What to type for this very command: `dilaserve` where the shell finds it, else its path."""
    script = Path(sys.executable).with_name("dilaserve")
    found = shutil.which("dilaserve")
    if not script.exists() or (found is not None and Path(found).samefile(script)):
        return "dilaserve"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)
