"""`dilaserve bench engine`: the bare engine's throughput, its parts, and how batches are fed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName, build_plan_policy

if TYPE_CHECKING:
    from dilaserve_bench.engine.batching import Batching
    from dilaserve_bench.engine.feed import Work
    from dilaserve_bench.engine.policies import PolicyRow
    from dilaserve_bench.engine.shares import EngineRow, Left
    from dilaserve_gpu_worker.engine.engine import Engine
    from dilaserve_gpu_worker.models.model import Model

__all__ = ["engine"]

BATCH = 16
"""Requests at a time when batches and plan policies are compared."""
PAGE = 32

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
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
ClockName = Annotated[
    Literal["wall", "cpu"],
    typer.Option(help="cpu: seconds of this process alone, where others want the cores, too."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def engine(
    model: Annotated[Path | None, typer.Option(help="Default: the bundled one.")] = None,
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
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    clock: ClockName = "wall",
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Throughput of the bare engine against its matrix products and attention alone."""
    import torch

    from dilaserve_bench.engine.feed import Work
    from dilaserve_gpu_worker.device import choose_device, choose_dtype
    from dilaserve_gpu_worker.weights import load_model

    torch.set_num_threads(threads)
    folder = find_model(model, os.environ)
    loaded = load_model(folder, device=choose_device(device), dtype=choose_dtype(dtype))
    work = Work(loaded.config.vocab_size, prompt, (output,), threshold)
    effort = Effort(passes, rounds, time.process_time if clock == "cpu" else time.perf_counter)
    cases = [(mode, int(n)) for mode in modes.split(",") for n in concurrency.split(",")]
    rows, left = _rows(loaded, work, msgspec.convert(cases, list[tuple[CacheMode, int]]), effort)
    batching, policies = None, []
    if mixed:
        outputs = tuple(map(int, mixed.split(",")))
        longer = Work(loaded.config.vocab_size, prompt, outputs, threshold)
        batching = _batching(loaded, longer, requests, effort)
        policies = _policies(loaded, longer, requests, effort, plan_policies, plan_tokens)
    if as_json:
        found = {"model": folder.name, "device": str(loaded.device), "threads": threads}
        found |= {"clock": clock, "plan_tokens": plan_tokens}
        compared = {"batching": batching, "plan_policies": policies}
        _print_json({**found, "rows": rows, **compared, "left": left})
    else:
        typer.echo("\n".join([*_lines(rows, left, batching), *_policy_lines(policies)]))


class Effort(NamedTuple):
    """How much is measured, and by which clock."""

    n_passes: int
    n_rounds: int
    clock: Callable[[], float]


def _rows(
    model: Model, work: Work, cases: list[tuple[CacheMode, int]], effort: Effort
) -> tuple[list[EngineRow], dict[str, list[Left]]]:
    rows, left = [], {}
    for mode, n in cases:
        sys.stderr.write(f"{mode}, {n} at a time\n")
        row, its_left = _row(model, work, mode, n, effort)
        rows.append(row)
        left[f"{mode} {n}"] = its_left
    return rows, left


def _row(
    model: Model, work: Work, mode: CacheMode, concurrency: int, effort: Effort
) -> tuple[EngineRow, list[Left]]:
    from dilaserve_bench.engine.feed import Feed, requests_of
    from dilaserve_bench.engine.shares import measure_row

    engine = _engine(model, work, mode, concurrency)
    feed = Feed(engine, requests_of(work), concurrency)
    name = mode, concurrency
    return measure_row(model, engine, feed, name=name, **effort._asdict())


def _batching(model: Model, work: Work, n_requests: int, effort: Effort) -> Batching:
    from dilaserve_bench.engine.batching import measure_batching

    sys.stderr.write("continuous and static batches\n")
    return measure_batching(
        _engine(model, work, "dual", BATCH),
        work,
        cache_mode="dual",
        concurrency=BATCH,
        n_requests=n_requests,
        n_rounds=effort.n_rounds,
        clock=effort.clock,
    )


def _policies(
    model: Model, work: Work, n_requests: int, effort: Effort, names: str, n_tokens: int
) -> list[PolicyRow]:
    from dilaserve_bench.engine.policies import measure_policies

    wanted = msgspec.convert(names.split(",") if names else [], list[PlanPolicyName])
    for name in wanted:
        sys.stderr.write(f"plan policy {name}\n")
    return measure_policies(
        {name: _engine(model, work, "dual", BATCH, name, n_tokens) for name in wanted},
        work,
        concurrency=BATCH,
        n_requests=n_requests,
        n_rounds=effort.n_rounds,
        clock=effort.clock,
    )


def _engine(
    model: Model,
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


def _print_json(found: dict[str, Any]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())


def _lines(
    rows: list[EngineRow], left: dict[str, list[Left]], batching: Batching | None
) -> Iterator[str]:
    yield "mode    at a time  tokens/s  step ms  outside forward  outside kernels  of bare"
    for row in rows:
        yield (
            f"{row.mode:6}  {row.concurrency:9}  {row.tokens_per_s:8.0f}  {row.step_ms:7.2f}  "
            f"{row.outside_forward:15.3f}  {row.outside_kernels:15.3f}  {row.of_bare:7.3f}"
        )
    for name, parts in left.items():
        shares = [f"{part.operator} {100 * part.share:.1f} %" for part in parts[:6]]
        yield f"outside kernels, {name}: {', '.join(shares)}"
    if batching is not None:
        yield (
            f"{batching.concurrency} at a time, mixed lengths: continuous "
            f"{batching.continuous:.0f} tokens/s, {batching.over_static:.2f} x static, "
            f"{batching.over_leaving:.2f} x static where ended requests leave the batch, "
            f"{batching.over_padded:.2f} x static and padded; {batching.fewer_passes:.2f} x fewer "
            "passes than static"
        )


def _policy_lines(rows: list[PolicyRow]) -> Iterator[str]:
    if rows:
        yield (
            "plan policy  tokens/s  passes  pass ms: mean, p99  gap ms: mean, p99  "
            "request ms: mean, p99"
        )
    for row in rows:
        yield (
            f"{row.plan_policy:11}  {row.tokens_per_s:8.0f}  {row.n_passes:6}  "
            f"{row.pass_ms:9.2f}  {row.pass_p99_ms:8.2f}  {row.gap_ms:8.2f}  "
            f"{row.gap_p99_ms:8.2f}  {row.request_ms:11.1f}  {row.request_p99_ms:9.1f}"
        )
