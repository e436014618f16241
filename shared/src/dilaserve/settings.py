"""Settings: one frozen struct per service, one loader, read once in the composition root.

A setting `block_length` is read from the variable `DILASERVE_BLOCK_LENGTH`. Each field is
an `Annotated[type, "help"]`, from which docs/reference.md is generated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dilaserve.errors import SettingsError

PREFIX = "DILASERVE_"

POSITIVE = msgspec.Meta(gt=0)
NOT_NEGATIVE = msgspec.Meta(ge=0)
AT_LEAST_ONE = msgspec.Meta(ge=1)

MOST_THREADS = 256
"""Torch starts any number of threads, and ends the process where the system has no more."""

T = TypeVar("T", bound=msgspec.Struct)


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every service has."""

    nats_url: Annotated[str, "NATS server, or several separated by commas"] = (
        "nats://127.0.0.1:4222"
    )
    redis_url: Annotated[str, "Redis or Valkey server"] = "redis://127.0.0.1:6379/0"
    log_level: Annotated[str, "debug, info, warning or error"] = "info"
    metrics_host: Annotated[str, "address of the Prometheus listener"] = "127.0.0.1"
    metrics_port: Annotated[
        int,
        "port of the Prometheus listener; 0 takes a free one, -1 none",
        msgspec.Meta(ge=-1, le=65535),
    ] = -1
    crash_at: Annotated[str, "fault tests only: `point:count` at which to die; empty: never"] = ""
    otlp_endpoint: Annotated[str, "OTLP/HTTP collector, e.g. http://collector:4318; empty: off"] = (
        ""
    )


def load(struct: type[T], environ: Mapping[str, str]) -> T:
    """Read `struct` from the environment. Raises SettingsError naming variable, value, remedy;
    unset and empty variables take the default, unknown DILASERVE_ ones are left alone."""
    values = {
        name: environ[variable(name)]
        for name in get_type_hints(struct)
        if environ.get(variable(name))
    }
    try:
        settings = msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(struct, values, error)) from error
    for name in values:
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            remedy = _remedy(struct, name)
            raise SettingsError(f"{variable(name)}={values[name]!r}: no finite number{remedy}")
    return settings


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def describe(struct: type[msgspec.Struct]) -> list[tuple[str, str, object, str]]:
    """Rows (variable, type, default, help) for the reference; default is NODEFAULT if required."""
    hints = get_type_hints(struct, include_extras=True)
    return [
        (variable(f.name), _type_name(hints[f.name]), f.default, _help(hints[f.name]))
        for f in msgspec.structs.fields(struct)
    ]


def _explain(
    struct: type[msgspec.Struct], values: Mapping[str, str], error: msgspec.ValidationError
) -> str:
    text = str(error)
    for name, raw in values.items():
        if f"`$.{name}`" in text:
            complaint = text.split(" - ")[0]
            complaint = complaint[:1].lower() + complaint[1:]
            return f"{variable(name)}={raw!r}: {complaint}{_remedy(struct, name)}"
    missing = [
        variable(f.name)
        for f in msgspec.structs.fields(struct)
        if f.required and f.name not in values
    ]
    return f"{', '.join(missing)} not set; {text}"


def _remedy(struct: type[msgspec.Struct], name: str) -> str:
    field = next(f for f in msgspec.structs.fields(struct) if f.name == name)
    if field.default is msgspec.NODEFAULT:
        return ""
    hint = get_type_hints(struct)[name]
    if get_origin(hint) is Literal:
        return f"; use {' or '.join(repr(value) for value in get_args(hint))}"
    return "; or leave it unset" if field.default == "" else f"; use for example {field.default!r}"


def _type_name(hint: Any) -> str:
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return getattr(base, "__name__", str(base))


def _help(hint: Any) -> str:
    return next((a for a in get_args(hint)[1:] if isinstance(a, str)), "")
