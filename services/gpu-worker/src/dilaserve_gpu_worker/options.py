"""Options that several commands share. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = ["MOST_THREADS", "Device", "Dtype", "PackWeights", "Threads"]

MOST_THREADS = 256
"""Torch starts any number of threads, and ends the process where the system has no more."""

Threads = Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="Torch threads.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PackWeights = Annotated[
    Literal["auto", "off"], typer.Option(help="Pack matrices on a CPU where that pays.")
]
