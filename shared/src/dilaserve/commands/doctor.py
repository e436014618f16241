"""`dilaserve doctor`: whether this machine can run a stack, and the remedy where it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dilaserve import doctor as checks
from dilaserve.commands.options import AsJson

MARKS = {"ok": "✓", "note": "·", "wrong": "✗"}


def doctor(
    model: Annotated[Path | None, typer.Option(help="Model folder to check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and say the remedies.

    Looks at Python, packages, binaries, ports, the model (as worker and gateway do before they
    load it, and what that leaves out), GPU and Docker; exits with 1 if one of those that a stack
    needs is wrong.
    """
    findings = checks.examine(model, os.environ)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        typer.echo("\n".join(map(_as_text, findings)))
    if any(finding.verdict == "wrong" for finding in findings):
        raise typer.Exit(1)


def _as_text(finding: checks.Finding) -> str:
    remedy = f"\n{'':13}→ {finding.remedy}" if finding.remedy else ""
    return f"{MARKS[finding.verdict]} {finding.name:<10} {finding.detail}{remedy}"
