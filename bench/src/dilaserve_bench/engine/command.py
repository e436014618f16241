"""`dilaserve bench engine`: the bare engine's throughput, its parts, and how batches are fed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import typer
from rich.console import Console

from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve_bench.engine.progress import Watch, watching
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName, build_plan_policy
from dilaserve_gpu_worker.options import Device, Dtype, Model, PackWeights, Threads

if TYPE_CHECKING:
    from dilaserve_bench.engine.batching import Batching
    from dilaserve_bench.engine.feed import Work
    from dilaserve_bench.engine.policies import PolicyRow
    from dilaserve_bench.engine.shares import EngineRow, Left
    from dilaserve_gpu_worker.engine.engine import Engine
    from dilaserve_gpu_worker.models.model import Model as LoadedModel

__all__ = ["engine"]

BATCH = 16
"""Requests at a time when batches and plan policies are compared."""
PAGE = 32
WITHOUT_PROFILER_LOG = "KINETO_LOG_LEVEL", "6"
"""Torch's profiler says by lines on standard error that it starts and stops, up to level 5."""
Count = Annotated[int, msgspec.Meta(ge=1)]

Modes = Annotated[str, typer.Option(help="Cache modes.")]
Concurrency = Annotated[str, typer.Option(help="Requests at a time.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
Output = Annotated[int, typer.Option(min=32, help="Tokens of an output.")]
Mixed = Annotated[
    str, typer.Option(help="Outputs when batches and plan policies are compared; empty: leave it.")
]
Requests = Annotated[int, typer.Option(min=1, help="Requests when these are compared.")]
PlanPolicies = Annotated[str, typer.Option(help="Plan policies to compare; empty: leave it.")]
PlanTokens = Annotated[
    int, typer.Option(min=1, help="Plan policy sangam: tokens of a pass on average.")
]
ClockName = Annotated[
    Literal["wall", "cpu"],
    typer.Option(help="cpu: seconds of this process alone, where others want the cores, too."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def engine(
    model: Model = None,
    modes: Modes = "none,prefix,dual",
    concurrency: Concurrency = "1,4,16",
    prompt: Prompt = 96,
    output: Output = 96,
    threshold: Annotated[float, typer.Option(help="Confidence threshold.")] = 0.9,
    passes: Annotated[int, typer.Option(min=1, help="Passes in a round.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind.")] = 5,
    mixed: Mixed = "32,256,64,32,128,96,32,64",
    requests: Requests = 64,
    plan_policies: PlanPolicies = "blockserve,sangam,static",
    plan_tokens: PlanTokens = 640,
    threads: Threads = 1,
    clock: ClockName = "wall",
    device: Device = "auto",
    dtype: Dtype = "auto",
    pack_weights: PackWeights = "auto",
    as_json: AsJson = False,
) -> None:
    """Throughput of the bare engine against its matrix products and attention alone: as the
    engine computes them (of bare), and with products as torch computes them (of torch)."""
    at_a_time = _each("--concurrency", concurrency, Count)
    cases = [(mode, n) for mode in _each("--modes", modes, CacheMode) for n in at_a_time]
    outputs = _each("--mixed", mixed, Count)
    compared = _each("--plan-policies", plan_policies, PlanPolicyName) if outputs else []
    from dilaserve_bench.engine.feed import Work
    from dilaserve_bench.engine.report import EngineReport, json_of, lines_of
    from dilaserve_gpu_worker.huge_pages import asks_for_huge_pages
    from dilaserve_gpu_worker.loading import load_alone

    os.environ.setdefault(*WITHOUT_PROFILER_LOG)
    folder = find_model(model, os.environ)
    loaded = load_alone(
        folder, threads=threads, device=device, dtype=dtype, pack_weights=pack_weights
    )
    size = loaded.config.vocab_size, prompt
    work, longer = (Work(*size, lengths, threshold) for lengths in ([output], outputs))
    effort = Effort(passes, rounds, time.process_time if clock == "cpu" else time.perf_counter)
    n_parts = len(cases) * (rounds + 2) + rounds * (4 * bool(outputs) + len(compared))
    with watching(Console(stderr=True), n_parts) as watch:
        rows, left = _rows(loaded, work, cases, effort, watch)
        batching = _batching(loaded, longer, requests, effort, watch) if outputs else None
        policies = _policies(loaded, longer, requests, effort, compared, plan_tokens, watch)
    report = EngineReport(
        model=folder.name, device=str(loaded.device), threads=threads, clock=clock, rows=rows,
        products="packed" if loaded.is_packed else "plain", plan_tokens=plan_tokens, left=left,
        huge_pages=asks_for_huge_pages(os.environ), batching=batching, plan_policies=policies,
    )  # fmt: skip
    typer.echo(json_of(report) if as_json else "\n".join(lines_of(report)))


class Effort(NamedTuple):
    """How much is measured, and by which clock."""

    n_passes: int
    n_rounds: int
    clock: Callable[[], float]


def _each(option: str, text: str, of: Any) -> list[Any]:
    """What an option names, in turn. `of`: words (Literal), or Count."""
    words = get_args(of) if get_origin(of) is Literal else ()
    takes = " or ".join(map(str, words)) or "a whole number of at least 1"
    found = []
    for part in text.split(",") if text else []:
        try:
            found.append(msgspec.convert(part.strip(), of, strict=False))
        except msgspec.ValidationError:
            raise typer.BadParameter(
                f"{option} {text!r}: {part!r} is not {takes}; several are separated by commas"
            ) from None
    return found


def _rows(
    model: LoadedModel, work: Work, cases: list[tuple[CacheMode, int]], effort: Effort, watch: Watch
) -> tuple[list[EngineRow], dict[str, list[Left]]]:
    from dilaserve_bench.engine.feed import Feed, requests_of
    from dilaserve_bench.engine.shares import measure_row

    rows, left = [], {}
    for mode, n in cases:
        watch.begins(f"{mode}, {n} at a time")
        engine = _engine(model, work, mode, n)
        feed = Feed(engine, requests_of(work), n)
        row, left[f"{mode} {n}"] = measure_row(
            model, engine, feed, name=(mode, n), reached=watch.reached, **effort._asdict()
        )
        rows.append(row)
    return rows, left


def _batching(
    model: LoadedModel, work: Work, n_requests: int, effort: Effort, watch: Watch
) -> Batching:
    from dilaserve_bench.engine.batching import measure_batching

    watch.begins("continuous and static batches")
    return measure_batching(
        _engine(model, work, "dual", BATCH),
        work,
        cache_mode="dual",
        concurrency=BATCH,
        n_requests=n_requests,
        n_rounds=effort.n_rounds,
        clock=effort.clock,
        reached=watch.reached,
    )


def _policies(
    model: LoadedModel,
    work: Work,
    n_requests: int,
    effort: Effort,
    names: list[PlanPolicyName],
    n_tokens: int,
    watch: Watch,
) -> list[PolicyRow]:
    from dilaserve_bench.engine.policies import measure_policies

    if not names:
        return []
    watch.begins("plan policies")
    return measure_policies(
        {name: _engine(model, work, "dual", BATCH, name, n_tokens) for name in names},
        work,
        concurrency=BATCH,
        n_requests=n_requests,
        n_rounds=effort.n_rounds,
        clock=effort.clock,
        reached=watch.reached,
    )


def _engine(
    model: LoadedModel,
    work: Work,
    mode: CacheMode,
    concurrency: int,
    plan_policy: PlanPolicyName = "blockserve",
    plan_tokens: int = 1,
) -> Engine:
    """With room for all requests at once."""
    from dilaserve_gpu_worker.engine.engine import Engine as BareEngine

    return BareEngine(
        model,
        cache_mode=mode,
        n_kv_tokens=concurrency * (work.longest + PAGE),
        max_batch_tokens=concurrency * work.longest,
        plan_policy=build_plan_policy(plan_policy, n_tokens=plan_tokens),
    )
