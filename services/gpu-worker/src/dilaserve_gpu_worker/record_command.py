"""`dilaserve record`: prompts → recorded steps. Torch is imported when the command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.recording import RecordingError, StepWriter, is_complete, read_runs
from dilaserve_gpu_worker.options import Device, Dtype, Model, PackWeights, Threads

if TYPE_CHECKING:
    from dilaserve_gpu_worker.recording import PlannedRun, Recorder

__all__ = ["record"]

MOST_SWITCHING = 1000
"""All runs are planned before the first one begins."""

Prompts = Annotated[
    Path, typer.Argument(help="JSON lines with prompt_ids; see `dilaserve tokenize`.")
]
Switching = Annotated[
    int,
    typer.Option(
        min=0, max=MOST_SWITCHING, help="Runs of each prompt whose threshold changes on the way."
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Fill the canvas; by default an EOS ends a run.")
]


def record(
    prompts: Prompts,
    out: Annotated[Path, typer.Option(help="File of recorded steps; what it has is kept.")],
    model: Model = None,
    model_name: Annotated[
        str, typer.Option(help="The model's id in the API; default: the folder's name.")
    ] = "",
    thresholds: Annotated[
        str, typer.Option(help="Candidate thresholds, each run from start to end.")
    ] = "0.5,0.6,0.7,0.8,0.9",
    switching: Switching = 3,
    last_switch: Annotated[int, typer.Option(min=2, help="Step up to which it may change.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the changes.")] = 0,
    output_len: Annotated[
        int, typer.Option(min=1, help="Canvas length of prompts that name none.")
    ] = 256,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 32,
    cache: Annotated[CacheMode, typer.Option(help="Which keys and values to keep.")] = "dual",
    concurrency: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 16,
    ignore_eos: IgnoreEos = False,
    threads: Threads = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    pack_weights: PackWeights = "auto",
) -> None:
    """Denoise prompts under every threshold and record the steps. Interrupted, it can go on."""
    candidates = _parse_thresholds(thresholds)
    folder = (model or find_model(None, os.environ)).resolve()
    model_id = model_name or folder.name
    from dilaserve_gpu_worker.loading import load_alone
    from dilaserve_gpu_worker.recording import Recorder, plan_runs, read_prompts

    planned = plan_runs(
        read_prompts(prompts, n_output=output_len),
        candidates, n_switching=switching, last_switch=last_switch, seed=seed,
        ignore_eos=ignore_eos,
    )  # fmt: skip
    done = _done(out, model_id, block, cache)
    recorder = Recorder(
        load_alone(
            folder, threads=threads, device=device, dtype=dtype, pack_weights=pack_weights
        ),
        model_id, cache=cache, block_length=block, concurrency=concurrency,
    )  # fmt: skip
    _write(recorder, planned, done, out)


def _done(out: Path, model_id: str, block_length: int, cache: CacheMode) -> set[str]:
    """Runs that the file has from start to end. Raises RecordingError where it has some that new
    ones cannot stand beside: nobody who reads it could tell them apart."""
    runs = read_runs([out]) if out.exists() else []
    for first, *_ in runs:
        kept = first.model_id, first.block_length, first.cache_mode or cache
        if kept != (model_id, block_length, cache):
            raise RecordingError(
                f"steps {out}: run {first.run_id} is of model, block and cache {kept}, not of "
                f"{(model_id, block_length, cache)}; give another --out"
            )
    return {run[0].run_id for run in runs if is_complete(run)}


def _write(recorder: Recorder, planned: list[PlannedRun], done: set[str], out: Path) -> None:
    runs = [run for run in planned if run.run_id not in done]
    n_done, n_steps = len(planned) - len(runs), 0
    columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    try:
        with (
            StepWriter(out) as writer,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task("runs", total=len(planned), completed=n_done)
            for steps in recorder.record(runs):
                writer.write(steps)
                n_done, n_steps = n_done + 1, n_steps + len(steps)
                progress.advance(task)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: {out} has {n_done} of {len(planned)} runs; the same command goes on"
        )
        raise typer.Exit(130) from None
    typer.echo(f"{out} has {len(done) + len(runs)} runs, {len(runs)} of them new ({n_steps} steps)")


def _parse_thresholds(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values) or len(set(values)) < len(values):
        raise typer.BadParameter(
            f"--thresholds {text!r} are not different numbers from 0 to 1; use for example 0.5,0.9"
        )
    return values
