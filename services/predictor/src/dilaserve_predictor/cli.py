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

LEAST_SHARE = 0.5
"""Of the runs of the predictor that is there, below which one is not replaced unasked."""


def train_predictor(
    data: Annotated[
        list[Path], typer.Argument(help="Files of recorded steps, or folders with *.jsonl.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the predictor; replaced at once.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a predictor of another model, or of more than twice the runs."
        ),
    ] = False,
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
    kept = _usable(out)
    if kept is not None and not force:
        _check_replacing(kept, model.info, out)
    path = model.save(out)
    if as_json:
        typer.echo(msgspec.json.encode(model.info).decode())
    else:
        instead = f", instead of one of {_in_short(kept)}" if kept is not None else ""
        typer.echo("\n".join([*as_lines(model.info), f"written to {path}{instead}"]))


def _usable(folder: Path) -> ModelInfo | None:
    """Of the predictor that is there; one that no service could load is no loss."""
    from dilaserve_predictor.model import PredictorError, StepModel

    try:
        return StepModel.load(folder).info
    except PredictorError:
        return None


def _check_replacing(kept: ModelInfo, new: ModelInfo, out: Path) -> None:
    """Errors of the two decide nothing: each was measured on runs of its own."""
    if new.model_id == kept.model_id and new.n_runs >= LEAST_SHARE * kept.n_runs:
        return
    raise DiLaServeError(
        f"the predictor in {out} is of {_in_short(kept)}; the new one, of {_in_short(new)}, was "
        "not written: give --force to replace it, more runs, or another --out"
    )


def _in_short(info: ModelInfo) -> str:
    return (
        f"{info.n_runs} runs of {info.model_id} ({info.n_prompts} prompts, held-out WMAPE "
        f"{info.errors['full'].wmape:.3f})"
    )


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
