"""Options that several commands share. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["MOST_THREADS", "Device", "Dtype", "Model", "PackWeights", "Threads"]

MOST_THREADS = 256
"""Torch starts any number of threads, and ends the process where the system has no more."""

Threads = Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="Torch threads.")]
Model = Annotated[
    Path | None, typer.Option(help="Model folder; default: DILASERVE_MODEL, or the bundled one.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type of weights.")
]
PackWeights = Annotated[
    Literal["auto", "off"], typer.Option(help="Pack matrices on a CPU where that pays.")
]
