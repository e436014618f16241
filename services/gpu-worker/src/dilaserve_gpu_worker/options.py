"""Options that several commands share. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dilaserve.settings import MOST_THREADS

__all__ = ["MOST_TOKENS", "Device", "Dtype", "Model", "PackWeights", "Threads"]

MOST_TOKENS = 2**24
"""Of a pass, or a block: more than any memory holds, and what lists of them can be made of."""

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
