"""The reference: commands, settings, subjects, messages, telemetry, errors, crash points."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import UnionType
from typing import get_args

import msgspec
import typer
from tables import code, first_line, table

from dilaserve import errors, messages, plan_messages, subjects
from dilaserve.addresses import CliSettings
from dilaserve.cli import GROUP, load_command
from dilaserve.crashpoints import CrashPoint
from dilaserve.settings import CommonSettings, describe
from dilaserve.telemetry.names import METRICS, SPANS
from dilaserve_gateway.settings import GatewaySettings
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_predictor.settings import PredictorSettings
from dilaserve_reconfigurator.settings import ReconfiguratorSettings
from dilaserve_scheduler.settings import SchedulerSettings

SETTINGS: dict[str, type[msgspec.Struct]] = {
    "Every service": CommonSettings,
    "Command line": CliSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "gpu-worker": WorkerSettings,
    "predictor": PredictorSettings,
    "reconfigurator": ReconfiguratorSettings,
}
DIRECTIONS: dict[str, UnionType | type[messages.Message]] = {
    "Gateway → scheduler": messages.GatewayToScheduler,
    "Scheduler → gateway (replies)": messages.SchedulerReply,
    "Scheduler, launcher → worker": messages.ToWorker,
    "Worker → scheduler": messages.WorkerEvent,
    "Worker → gateway": messages.ToGateway,
    "Scheduler → predictor": messages.ToPredictor,
    "Predictor → scheduler (replies)": messages.FromPredictor,
    "Reconfigurator → all": plan_messages.FromPlanner,
    "Reconfigurator → scheduler": plan_messages.Drain,
    "Scheduler → reconfigurator (replies)": plan_messages.Drained | plan_messages.NotDrained,
}


def reference() -> str:
    """The whole page."""
    parts = [commands(), settings(), bus_subjects(), bus_messages(), telemetry(), error_tree()]
    return "# Reference\n\n" + "\n\n".join([*parts, crash_points()]) + "\n"


def commands() -> str:
    """Every command of the CLI with its options."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    found = (command for entry in entries for command in _parts(load_command(entry), ""))
    return "\n\n".join(["## Commands", *(_command(name, command) for name, command in found)])


def settings() -> str:
    """Every variable, by service; what all services share stands once."""
    shared = {row[0] for row in describe(CommonSettings)}
    sections = []
    for title, struct in SETTINGS.items():
        rows = [
            (code(name), kind, "required" if default is msgspec.NODEFAULT else code(default), text)
            for name, kind, default, text in describe(struct)
            if title not in MODULE_TITLES or name not in shared
        ]
        sections.append(f"### {title}\n\n" + table(("variable", "type", "default", ""), rows))
    return "\n\n".join(["## Settings", *sections])


MODULE_TITLES = ("gateway", "scheduler", "gpu-worker", "predictor", "reconfigurator")


def bus_subjects() -> str:
    """Every subject on NATS."""
    rows = []
    for name, value in vars(subjects).items():
        if inspect.isfunction(value):
            parameters = [f"<{parameter}>" for parameter in inspect.signature(value).parameters]
            rows.append((code(value(*parameters)), first_line(value.__doc__)))
        elif name.isupper() and name != "PREFIX":
            rows.append((code(value), name.replace("_", " ").lower()))
    return "## Subjects\n\n" + table(("subject", ""), rows)


def bus_messages() -> str:
    """Every message, and the structs within them, as JSON fields."""
    sections = [
        "## Messages",
        "JSON, tagged by `type`. Fields that a receiver does not know are skipped. `Count` is an "
        "integer from 0 to 2^40, `Number` one of either sign, `TokenId` one below 2^31, `Word` one "
        "token of a subject: letters, digits, `-` and `_`. Anything else is counted, logged and "
        "dropped.",
    ]
    for title, union in DIRECTIONS.items():
        kinds = get_args(union) or (union,)
        sections.append("\n\n".join([f"### {title}", *map(_struct, kinds)]))
    parts = [
        value
        for value in {**vars(messages), **vars(plan_messages)}.values()
        if inspect.isclass(value)
        and issubclass(value, msgspec.Struct)
        and not issubclass(value, messages.Message)
    ]
    return "\n\n".join([*sections, "### Within messages", *map(_struct, parts)])


def telemetry() -> str:
    """Every metric and span."""
    metrics = [
        (code(m.name), m.kind, m.unit, ", ".join(m.labels), ", ".join(m.services), m.help)
        for m in METRICS.values()
    ]
    spans = [
        (code(s.name), code(s.parent), ", ".join(s.services), ", ".join(s.attributes), s.help)
        for s in SPANS.values()
    ]
    return "\n\n".join(
        [
            "## Telemetry",
            "### Metrics",
            table(("name", "kind", "unit", "labels", "services", ""), metrics),
            "### Spans",
            table(("name", "parent", "services", "attributes", ""), spans),
        ]
    )


def error_tree() -> str:
    """Every error that is raised on purpose."""
    rows = [
        (code(name), code(value.__bases__[0].__name__), first_line(value.__doc__))
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DiLaServeError)
    ]
    return "## Errors\n\n" + table(("error", "is a", ""), rows)


def crash_points() -> str:
    """Where DILASERVE_CRASH_AT can kill a process."""
    points = "\n".join(f"- {code(point)}" for point in get_args(CrashPoint))
    return (
        "## Crash points\n\nFor fault tests: `DILASERVE_CRASH_AT=point:count` kills the process "
        f"the count-th time it gets there.\n\n{points}"
    )


def _parts(command: object, above: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """A command, or those of a group, with their full names."""
    assert isinstance(command, typer.core.TyperCommand | typer.core.TyperGroup)
    name = f"{above} {command.name}".strip()
    if isinstance(command, typer.core.TyperCommand):
        yield name, command
        return
    for part in command.commands.values():
        yield from _parts(part, name)


def _command(name: str, command: typer.core.TyperCommand) -> str:
    parameters = [
        (code(_declaration(parameter)), _default(parameter.default), parameter.help or "")
        for parameter in command.params
        if isinstance(parameter, typer.core.TyperOption | typer.core.TyperArgument)
    ]
    text = f"### `dilaserve {name}`\n\n{first_line(command.help)}"
    return f"{text}\n\n{table(('', 'default', ''), parameters)}" if parameters else text


def _declaration(parameter: object) -> str:
    if isinstance(parameter, typer.core.TyperArgument):
        return str(parameter.name).upper()
    assert isinstance(parameter, typer.core.TyperOption)
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _default(default: object) -> str:
    return "" if default is None or default is False or callable(default) else code(default)


def _struct(struct: type[msgspec.Struct]) -> str:
    tag = struct.__struct_config__.tag
    title = f"**{struct.__name__}**" + (f" `type: {tag}`" if tag else "")
    types = struct.__annotations__
    fields = [
        (
            code(field.name),
            code(types[field.name]),
            "required" if field.required else code(_field_default(field)),
        )
        for field in msgspec.structs.fields(struct)
    ]
    body = table(("field", "type", "default"), fields) if fields else "No fields."
    return f"{title} — {first_line(struct.__doc__)}\n\n{body}"


def _field_default(field: msgspec.structs.FieldInfo) -> object:
    if field.default is not msgspec.NODEFAULT:
        return repr(field.default) if field.default == "" else field.default
    return "[]"
