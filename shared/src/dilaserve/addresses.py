"""How commands find a stack: by option, by variable, by the state file, else the usual ports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dilaserve.settings import CommonSettings, load
from dilaserve.supervisor.state import running_state

__all__ = ["Addresses", "CliSettings", "find_addresses", "is_usual", "stack_home"]

DEFAULT_GATEWAY_URL = "http://127.0.0.1:8000"


class CliSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the command line; empty addresses are those of the stack that runs here."""

    home: Annotated[str, "folder of the embedded stack's state"] = ".dilaserve"
    model: Annotated[str, "model folder; empty: models/tiny here or in the source checkout"] = ""
    planner: Annotated[
        Literal["none", "advise", "apply"], "planner of the embedded stack; see `dilaserve up`"
    ] = "none"
    gateway_url: Annotated[str, "gateway that commands talk to"] = ""
    nats_url: Annotated[str, "NATS that commands talk to"] = ""
    redis_url: Annotated[str, "Redis or Valkey that commands talk to"] = ""


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stack listens."""

    gateway_url: str
    nats_url: str
    redis_url: str


def stack_home(environ: Mapping[str, str]) -> Path:
    """The folder of the embedded stack's state."""
    return Path(load(CliSettings, environ).home).absolute()


def find_addresses(environ: Mapping[str, str]) -> Addresses:
    """Addresses from DILASERVE_* variables, else of the stack that runs here, else the usual."""
    settings = load(CliSettings, environ)
    stack = running_state(stack_home(environ))
    usual = CommonSettings()
    return Addresses(
        gateway_url=settings.gateway_url or (stack.gateway_url if stack else DEFAULT_GATEWAY_URL),
        nats_url=settings.nats_url or (stack.nats_url if stack else usual.nats_url),
        redis_url=settings.redis_url or (stack.redis_url if stack else usual.redis_url),
    )


def is_usual(environ: Mapping[str, str], name: Literal["nats_url", "redis_url"]) -> bool:
    """Whether `find_addresses` can but guess this one: no variable names it, and no stack runs
    here."""
    return not getattr(load(CliSettings, environ), name) and not running_state(stack_home(environ))
