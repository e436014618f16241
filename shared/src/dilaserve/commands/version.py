"""`dilaserve version`."""

from __future__ import annotations

from importlib import metadata

import typer


def version() -> None:
    """Print the versions of what is installed."""
    distributions = {
        distribution.name: distribution.version
        for distribution in metadata.distributions()
        if distribution.name.startswith("dilaserve")
    }
    for name, number in sorted(distributions.items()):
        typer.echo(f"{name} {number}")
