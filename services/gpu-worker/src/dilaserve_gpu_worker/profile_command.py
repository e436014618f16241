"""`dilaserve profile`: a model folder → its latency profile. Torch is imported when it runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.profiles import (
    LatencyProfile,
    Point,
    ProfileError,
    ProfileSet,
    load_profiles,
    save_profiles,
)
from dilaserve_gpu_worker.options import (
    MOST_TOKENS,
    Device,
    Dtype,
    Model,
    PackWeights,
    Threads,
)

if TYPE_CHECKING:
    from dilaserve_gpu_worker.engine.engine import Engine
    from dilaserve_gpu_worker.profiling import Effort, Grid, Load
    from dilaserve_gpu_worker.settings import WorkerSettings

__all__ = ["profile", "with_point"]

Out = Annotated[Path, typer.Option(help="The profile; the points that it has are kept.")]
Degrees = Annotated[str, typer.Option("--tp", help="TP degrees, such as 1,2,4.")]
Lengths = Annotated[str, typer.Option(help="Tokens of a request, prompt and output.")]
Rows = Annotated[str, typer.Option(help="Requests in a pass.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Most tokens of a request's output.")]
Block = Annotated[int, typer.Option(min=8, max=MOST_TOKENS, help="Tokens in a block.")]
Cache = Annotated[CacheMode, typer.Option(help="Which keys and values to keep.")]
Budget = Annotated[
    int, typer.Option(min=1, max=MOST_TOKENS, help="Most tokens computed in a pass.")
]
Passes = Annotated[int, typer.Option(min=3, help="Passes of which a point is the median.")]
Seconds = Annotated[float, typer.Option(min=0, help="Of a point, after which 3 passes do.")]
CudaGraphs = Annotated[
    Literal["auto", "on", "off"], typer.Option(help="Replay passes of cache steps alone.")
]
Compile = Annotated[
    Literal["off", "on"], typer.Option("--compile", help="Have torch compile the blocks.")
]


def profile(
    out: Out,
    model: Model = None,
    tp: Degrees = "1",
    lengths: Lengths = "128,256,512,1024,2048,4096",
    rows: Rows = "1,2,4,8,16,32,64,128,256",
    output_len: OutputLen = 256,
    block: Block = 32,
    cache: Cache = "dual",
    max_batch_tokens: Budget = 8192,
    passes: Passes = 7,
    seconds: Seconds = 2.0,
    threads: Threads = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    cuda_graphs: CudaGraphs = "auto",
    compile_blocks: Compile = "off",
    pack_weights: PackWeights = "auto",
    model_name: Annotated[str, typer.Option(help="Default: the folder's name.")] = "",
) -> None:
    """Measure the latency of passes by TP degree, kind, tokens and rows. A rerun goes on."""
    degrees = _counts("--tp", tp)
    folder = model or find_model(None, os.environ)
    from dilaserve_gpu_worker.profiling import Effort, Grid
    from dilaserve_gpu_worker.settings import WorkerSettings

    grid = Grid(_counts("--lengths", lengths, least=2), _counts("--rows", rows), output_len, block)
    settings = msgspec.convert(
        {
            "model": str(folder), "model_name": model_name or folder.resolve().name,
            "cache_mode": cache, "block_length": block, "max_batch_tokens": max_batch_tokens,
            "threads": threads, "device": device, "dtype": dtype,
            "cuda_graphs": cuda_graphs, "compile": compile_blocks, "pack_weights": pack_weights,
        },
        WorkerSettings,
    )  # fmt: skip
    try:
        for degree in degrees:
            _measure_degree(settings, degree, grid, Effort(2, passes, seconds), out)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {out} keeps what is measured; the same command goes on")
        raise typer.Exit(130) from None
    typer.echo("\n".join(_summary(load_profiles(out))))


def with_point(profiles: ProfileSet, tp_degree: int, point: Point) -> ProfileSet:
    """The same with one more point."""
    others = [each for each in profiles.profiles if each.tp_degree != tp_degree]
    points = [*_points(profiles, tp_degree), point]
    profile = LatencyProfile(tp_degree=tp_degree, points=points)
    ordered = sorted([*others, profile], key=lambda each: each.tp_degree)
    return msgspec.structs.replace(profiles, profiles=ordered)


def _measure_degree(
    settings: WorkerSettings, degree: int, grid: Grid, effort: Effort, out: Path
) -> None:
    from dilaserve_gpu_worker.model_config import read_config
    from dilaserve_gpu_worker.profiling import left_out, loads_of, measure

    config = read_config(Path(settings.model))
    with _engine(settings, degree) as engine:
        profiles = _going_on(out, _fresh(settings, grid, engine))
        loads = loads_of(grid, settings.cache_mode, engine.limits)
        if not loads:
            raise ProfileError(
                f"no length of --lengths fits into a pass of {settings.max_batch_tokens} tokens, "
                f"the model's {config.max_sequence_length} and a KV pool of "
                f"{engine.n_free_kv_tokens}; use shorter ones"
            )
        for line in left_out(grid, settings.cache_mode, engine.limits):
            typer.echo(f"TP-{degree} is measured without {line}", err=True)
        done = {(p.kind, p.n_tokens, p.n_rows, p.n_keys) for p in _points(profiles, degree)}
        left = [load for load in loads if load.key not in done]
        for load in _watched(left, degree, n_done=len(loads) - len(left)):
            point = measure(engine, config, grid, load, effort)
            profiles = with_point(profiles, degree, point)
            save_profiles(profiles, out)


@contextmanager
def _engine(settings: WorkerSettings, degree: int) -> Iterator[Engine]:
    """Of one degree, with its ranks' processes."""
    from dilaserve_gpu_worker.loading import load_engine, start_ranks

    sharded = msgspec.structs.replace(settings, tp_degree=degree)
    with start_ranks(sharded) or nullcontext() as ranks:
        yield load_engine(sharded, ranks)[0]


def _watched(loads: Sequence[Load], degree: int, *, n_done: int) -> Iterator[Load]:
    """The loads, with a bar that moves on as they are taken."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(f"TP-{degree}", total=n_done + len(loads), completed=n_done)
        for load in loads:
            what = f"TP-{degree} {load.kind}, {load.n_rows} x {load.length}"
            progress.update(task, description=what)
            yield load
            progress.advance(task)


def _fresh(settings: WorkerSettings, grid: Grid, engine: Engine) -> ProfileSet:
    """A profile without points, and all that its points have in common."""
    import torch

    from dilaserve_gpu_worker.device import choose_device
    from dilaserve_gpu_worker.weights import weights_hash

    device = choose_device(settings.device)
    on_gpu = device.type == "cuda"
    return ProfileSet(
        model=settings.model_name,
        device=torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        source=f"dilaserve profile, torch {torch.__version__}",
        conditions={
            "weights": weights_hash(Path(settings.model)),
            "device": device.type,
            "dtype": engine.dtype,
            "attention": engine.attention,
            "products": engine.products,
            "cuda-graphs": settings.cuda_graphs,
            "compile": settings.compile,
            "kernels": engine.kernels,
            "threads": str(settings.threads),
            "cache": settings.cache_mode,
            "block": str(settings.block_length),
            "output-len": str(grid.n_output),
        },
        profiles=[],
    )


def _going_on(path: Path, fresh: ProfileSet) -> ProfileSet:
    """What the file has, or `fresh`. Raises ProfileError for a file that was measured otherwise."""
    if not path.exists():
        return fresh
    kept = load_profiles(path)
    ours, theirs = ({"model": p.model, "name": p.device, **p.conditions} for p in (fresh, kept))
    if ours != theirs:
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        was = f"was measured with {name} {theirs[name]!r}" if name in theirs else f"names no {name}"
        raise ProfileError(
            f"latency profile {path} {was}, and now it is {ours.get(name)!r}; "
            "give another file by --out"
        )
    return kept


def _points(profiles: ProfileSet, tp_degree: int) -> list[Point]:
    return [p for each in profiles.profiles if each.tp_degree == tp_degree for p in each.points]


def _summary(profiles: ProfileSet) -> Iterator[str]:
    for profile in profiles.profiles:
        for kind in dict.fromkeys(point.kind for point in profile.points):
            points = [point for point in profile.points if point.kind == kind]
            curve = profile.curve(kind)
            ends = min(p.n_tokens for p in points), curve.n_measured
            seconds = [f"{n} tokens {1000 * curve.seconds(n):.2f} ms" for n in ends]
            yield f"TP-{profile.tp_degree} {kind}: {len(points)} points, {' to '.join(seconds)}"


def _counts(option: str, text: str, *, least: int = 1) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < least or len(set(values)) < len(values):
        raise typer.BadParameter(
            f"{option} {text!r} are not different counts of at least {least}; "
            f"use for example {least},{2 * least}"
        )
    return values
