"""How fast an engine is, and how well a live stack serves: `dilaserve bench engine | serve`."""

from __future__ import annotations

import typer

from dilaserve_bench.engine.command import engine
from dilaserve_bench.live.command import serve

__all__ = ["bench"]

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="How fast the engine is, and how well a live stack serves.",
)
bench.command()(engine)
bench.command()(serve)
