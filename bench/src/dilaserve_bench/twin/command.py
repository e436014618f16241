"""`dilaserve simulate`: a policy over a virtual cluster, faster than the real one by far."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from dilaserve.messages import CacheMode
from dilaserve_bench.twin.advice import PUBLISHED_WMAPE
from dilaserve_bench.twin.checks import check_plot
from dilaserve_bench.twin.options import SimulateOptions, make_plan
from dilaserve_bench.twin.report import Report, report, report_run
from dilaserve_bench.twin.runner import run_seeds, watching
from dilaserve_bench.twin.text import as_lines
from dilaserve_gpu_worker.engine.plan_policy import PLAN_TOKENS, PlanPolicyName
from dilaserve_gpu_worker.options import Threads

PolicyName = Annotated[str, typer.Option(help="Who chooses instances and thresholds.")]
Threshold = Annotated[float, typer.Option(help="Threshold of policies with a fixed one.")]
Instances = Annotated[str, typer.Option(help="Such as 16xtp1 or 8xtp1,2xtp4.")]
Budget = Annotated[int, typer.Option(help="Tokens of full lengths on one instance.")]
Cache = Annotated[CacheMode, typer.Option(help="Which keys and values instances keep.")]
PlanPolicy = Annotated[PlanPolicyName, typer.Option(help="Which rows make up a pass.")]
PlanTokens = Annotated[int, typer.Option(help="Plan policy sangam: tokens of a pass on average.")]
ProfileFile = Annotated[
    str, typer.Option("--profile", help="Latency profile; default: LLaDA on H100 (published).")
]
Overhead = Annotated[float, typer.Option(help="Factor on the profiled seconds of every pass.")]
Lookup = Annotated[
    Literal["smoothed", "ceil"],
    typer.Option(help="Latencies smoothed and interpolated, or of the next larger measured size."),
]
Rate = Annotated[float, typer.Option(help="Poisson arrivals a second, per GPU.")]
Trace = Annotated[
    str, typer.Option(help="Arrivals of Azure's or BurstGPT's CSV, or rates of ServeGen's.")
]
AverageDay = Annotated[
    bool, typer.Option("--average-day", help="Arrivals of the paper's 2-hour trace.")
]
Speed = Annotated[float, typer.Option(help="Factor on the arrivals of a trace or of the day.")]
Requests = Annotated[
    int | None, typer.Option(help="How many; default: 1,319, or all of a trace or of the day.")
]
Sizes = Annotated[
    Literal["fixed", "sharegpt"],
    typer.Option(help="fixed: --prompt and --output; sharegpt: the published mix of classes."),
]
Prompt = Annotated[
    int | None,
    typer.Option(help="Tokens of a prompt; default: 1,075, or with a model its problem's own."),
]
Output = Annotated[int, typer.Option(help="Tokens of an output.")]
Slo = Annotated[float, typer.Option("--slo", help="Seconds within which a request is to end.")]
Source = Annotated[
    Literal["recorded", "model"],
    typer.Option(help="Steps as recorded, or a real model that denoises every request."),
]
StepsFile = Annotated[
    str, typer.Option("--steps", help="Recorded steps; default: LLaDA on GSM8K (published).")
]
ModelFolder = Annotated[str, typer.Option("--model", help="Its folder; default: the bundled one.")]
Problems = Annotated[int, typer.Option(help="Held-out problems of each task for the model.")]
PredictorError = Annotated[
    float,
    typer.Option(
        help="WMAPE of the predictor's stand-in for recorded steps; below 0: no predictor."
    ),
]
RunAhead = Annotated[
    int | None,
    typer.Option(help="Steps an instance may run by itself; default: a block. 1: lock step."),
]
Faults = Annotated[
    list[str],
    typer.Option(
        "--fault",
        help="t=10:kill=0, t=10:kill=0:for=5, t=10:leave=0, t=20:pause=1.5, t=20:restart=2; "
        "may be given more than once.",
    ),
]
Horizon = Annotated[
    float | None, typer.Option("--horizon", help="Virtual seconds after which to break off.")
]
Replan = Annotated[
    bool,
    typer.Option("--replan", help="Let the planner change the TP degrees of the instances."),
]
ReplanEvery = Annotated[
    float, typer.Option("--replan-every", help="Seconds from plan to plan, of arrivals seen.")
]
Nodes = Annotated[
    str, typer.Option(help="GPUs of the nodes, as in 4x4; default: nodes of 4, or a single one.")
]
MinGain = Annotated[float, typer.Option(help="What a change of the mix has to bring, as a share.")]
StartUpTime = Annotated[
    str,
    typer.Option(
        "--start-up",
        help="What launching an instance takes: GB of weights / GB read a second + seconds.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from --first-seed.")]
FirstSeed = Annotated[int, typer.Option(help="The first of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw it into this file: .png, .svg or .pdf.")
]


def simulate(
    policy: PolicyName = "dilaserve",
    threshold: Threshold = 0.9,
    instances: Instances = "16xtp1",
    budget: Budget = 8192,
    cache: Cache = "dual",
    plan_policy: PlanPolicy = "blockserve",
    plan_tokens: PlanTokens = PLAN_TOKENS,
    profile: ProfileFile = "",
    overhead: Overhead = 1.0,
    lookup: Lookup = "smoothed",
    rate: Rate = 1.5,
    trace: Trace = "",
    average_day: AverageDay = False,
    speed: Speed = 1.0,
    requests: Requests = None,
    sizes: Sizes = "fixed",
    prompt: Prompt = None,
    output: Output = 256,
    slo: Slo = 9.5,
    source: Source = "recorded",
    steps: StepsFile = "",
    model: ModelFolder = "",
    problems: Problems = 64,
    threads: Threads = 1,
    predictor_error: PredictorError = PUBLISHED_WMAPE,
    run_ahead: RunAhead = None,
    fault: Faults = [],  # noqa: B006
    horizon: Horizon = None,
    replan: Replan = False,
    replan_every: ReplanEvery = 300.0,
    nodes: Nodes = "",
    min_gain: MinGain = 0.1,
    start_up: StartUpTime = "16/2+20",
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Run a policy over a virtual cluster; Ctrl-C ends it and reports what there is."""
    if plot is not None:
        check_plot(plot)
    options = SimulateOptions(
        policy=policy, threshold=threshold, instances=instances, budget=budget, cache=cache,
        plan_policy=plan_policy, plan_tokens=plan_tokens,
        profile=profile, overhead=overhead, lookup=lookup, rate=rate, trace=trace,
        average_day=average_day, speed=speed, requests=requests, sizes=sizes, prompt=prompt,
        output=output, slo_s=slo, source=source, steps=steps, model=model, problems=problems,
        threads=threads, predictor_error=predictor_error, run_ahead=run_ahead,
        faults=tuple(fault), horizon_s=horizon, replan=replan, replan_every_s=replan_every,
        nodes=nodes, min_gain=min_gain, start_up=start_up,
    )  # fmt: skip
    _show(_run(options, range(first_seed, first_seed + seeds)), as_json=as_json, plot=plot)


def _show(answer: Report, *, as_json: bool, plot: Path | None) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    else:
        typer.echo("\n".join(as_lines(answer)))
    if plot is not None:
        from dilaserve_bench.twin.plot import save_plot

        save_plot(answer, plot)


def _run(options: SimulateOptions, seeds: range) -> Report:
    plan = make_plan(options, os.environ)
    with watching(Console(stderr=True)) as watch:
        runs = [
            report_run(run)
            for run in run_seeds(
                plan.scenario, plan.workloads, seeds, watch=watch, timer=time.perf_counter
            )
        ]
    return report(msgspec.to_builtins(options), runs)
