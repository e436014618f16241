"""The `dilaserve` command: finds the commands of all installed distributions, runs one of them.

Every command, our own too, is an entry point `name = "module:function"` of the group
`dilaserve.commands`. Its module is imported when it is called, and not for `--help`, which reads
the help line from the source; so listing the commands of a worker does not import torch.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dilaserve.errors import DiLaServeError

__all__ = ["GROUP", "build_cli", "load_command", "main"]

GROUP = "dilaserve.commands"


def main() -> None:
    """Entry point of the console script; never returns."""
    try:
        build_cli(entry_points(group=GROUP))(prog_name="dilaserve")
    except DiLaServeError as error:
        if "--debug" in sys.argv[1:2]:
            raise
        print(f"dilaserve: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def build_cli(commands: Iterable[EntryPoint]) -> TyperGroup:
    """A command group over entry points. Nothing is imported until a command is invoked."""
    app = typer.Typer(
        cls=_LazyGroup,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    group = typer.main.get_command(app)
    assert isinstance(group, _LazyGroup)
    group.entries = {entry.name: entry for entry in commands}
    for name, entry in sorted(group.entries.items()):
        group.add_command(TyperCommand(name, help=_help_line(entry), rich_markup_mode=None))
    return group


def load_command(entry: EntryPoint) -> Any:
    """The command of an entry point, whose target is a function or a typer application."""
    target = entry.load()
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command()(target)
    command = typer.main.get_command(app)
    command.name = entry.name
    return command


class _LazyGroup(TyperGroup):
    """Holds a stub per command, and puts the real one in its place when it is invoked."""

    entries: dict[str, EntryPoint]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        entry = self.entries.get(args[0])
        if entry is not None:
            self.add_command(load_command(entry))
        return super().resolve_command(ctx, args)


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """DiLaServe: serving diffusion language models within their latency promises."""


def _help_line(entry: EntryPoint) -> str:
    """The first line of the docstring of an entry point's target, or for a group of commands, of
    its module; empty if it cannot be read."""
    source = _source(entry.module)
    if source is None:
        return ""
    module = ast.parse(source.read_bytes())
    targets: list[ast.FunctionDef | ast.Module] = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr
    ]
    return (ast.get_docstring((targets or [module])[0]) or "").partition("\n")[0]


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)  # imports the parent packages, which are light
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
