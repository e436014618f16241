"""`dilaserve train-predictor`: recorded steps → the folder of a step predictor.

LightGBM is imported when the command runs, not when it is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from dilaserve.errors import DiLaServeError
from dilaserve.recording import read_runs

if TYPE_CHECKING:
    from dilaserve_predictor.model import ModelInfo

__all__ = ["train_predictor"]


def train_predictor(
    data: Annotated[
        list[Path], typer.Argument(help="Files of recorded steps, or folders with *.jsonl.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the predictor; replaced at once.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a step predictor from recorded runs, and say what it is worth."""
    from dilaserve_predictor.train import n_fits, train

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=n_fits() + 1)
        runs = read_runs(_files(data))
        progress.update(task, advance=1, description="training")
        model = train(runs, told=lambda: progress.advance(task))
    path = model.save(out)
    if as_json:
        typer.echo(msgspec.json.encode(model.info).decode())
    else:
        typer.echo("\n".join([*as_lines(model.info), f"written to {path}"]))


def as_lines(info: ModelInfo) -> list[str]:
    """For people."""
    lines = [
        f"{info.model_id}: {info.n_runs} runs ({info.n_switching_runs} switch their threshold) of "
        f"{info.n_prompts} prompts, {info.n_rows} states",
        f"{'variant':<10}{'WMAPE':>8}{'at arrival':>12}   (prompts held out, {info.n_folds} folds)",
    ]
    lines += [
        f"{variant:<10}{error.wmape:>8.3f}{error.wmape_at_arrival:>12.3f}"
        for variant, error in info.errors.items()
    ]
    curve = ", ".join(f"{n}: {error:.3f}" for n, error in info.granularity)
    return [
        *lines,
        f"{info.upper_coverage:.1%} of the truths are at or below the {info.upper_quantile:.0%} "
        "quantile",
        f"WMAPE by newly unmasked tokens between two predictions: {curve}",
        f"by the 5 % rule: predict anew every {info.refresh_tokens} tokens; "
        "the scheduler does, unless DILASERVE_REFRESH_TOKENS says otherwise",
    ]


def _files(data: list[Path]) -> list[Path]:
    files = [
        file
        for path in data
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    if not files:
        raise DiLaServeError(
            f"no *.jsonl in {', '.join(map(str, data))}; record steps with `dilaserve record`"
        )
    return files
