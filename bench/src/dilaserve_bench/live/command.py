"""`dilaserve bench serve`: open-loop load on a live gateway, wherever it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dilaserve.client import connect_gateway, model_ids
from dilaserve.commands.options import GatewayUrl, gateway_url_or_found

if TYPE_CHECKING:
    from dilaserve_bench.live.serve import Served
    from dilaserve_bench.twin.workload import RequestClass, Workload

__all__ = ["serve"]

BLOCK = 32
MOST_OF_AN_ERROR = 500
LONGEST = 4096
"""Requests of a trace that have more tokens are left out, as in the paper (Table 3)."""

Rates = Annotated[str, typer.Option("--rate", help="Poisson arrivals a second, such as 2,4,8.")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Arrival times and output lengths of Azure's or BurstGPT's CSV."),
]
Speed = Annotated[float, typer.Option(help="Factor on the arrivals of a trace.")]
Requests = Annotated[int, typer.Option(min=2, help="How many, at each rate.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="JSON lines with messages, prompt, question or turns; default: sums."),
]
Output = Annotated[int, typer.Option(min=1, help="Tokens of an output; of a trace, the most.")]
Slo = Annotated[
    float | None, typer.Option("--slo", help="Seconds to ask for; default: the gateway's.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Fill the whole canvas.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw it into this file: .png, .svg or .pdf.")
]


def serve(
    url: GatewayUrl = None,
    model: Annotated[str, typer.Option(help="Default: the first that is served.")] = "",
    rate: Rates = "2",
    trace: TraceFile = None,
    speed: Speed = 1.0,
    requests: Requests = 100,
    prompts: Prompts = None,
    output: Output = 96,
    slo: Slo = None,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, typer.Option(help="Of the arrivals and the sums.")] = 0,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Send requests at their own times to a live gateway; latencies, attainment, thresholds."""
    from dilaserve_bench.live.prompts import read_messages, sums
    from dilaserve_bench.twin.checks import check_plot
    from dilaserve_bench.twin.workload import RequestClass

    if plot is not None:
        check_plot(plot)
    messages = read_messages(prompts) if prompts else sums(requests, seed)
    like = RequestClass(n_prompt=1, n_output=output, slo_s=slo)
    loads = _loads(rate, trace, speed, requests, like, len(messages), seed)
    extra = {"temperature": temperature, "ignore_eos": ignore_eos}
    served: list[Served] = []
    try:
        asyncio.run(_serve(gateway_url_or_found(url), model, loads, messages, slo, extra, served))
    except KeyboardInterrupt:
        typer.echo("interrupted: here are the loads that ended", err=True)
    if as_json:
        rows = {"rows": [each.row for each in served]}
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode())
    else:
        typer.echo("\n".join(_lines(served)))
    for each in served:
        _tell_failure(each)
    if plot is not None and served:
        from dilaserve_bench.live.serve_plot import save_plot

        save_plot(served, plot)
    if len(served) < len(loads):
        raise typer.Exit(130)
    if not any(each.row.n_done for each in served):
        raise typer.Exit(1)


Load = tuple[str, "Workload"]
"""Its name, and what arrives."""


def _loads(
    rates: str,
    trace: Path | None,
    speed: float,
    n: int,
    like: RequestClass,
    n_cases: int,
    seed: int,
) -> list[Load]:
    from dilaserve_bench.twin.traces import read_trace
    from dilaserve_bench.twin.workload import poisson, replayed

    if trace is None:
        return [
            ("poisson", poisson([like], rate=rate, n=n, n_cases=n_cases)(seed))
            for rate in _positive(rates)
        ]
    entries = read_trace(trace, block_length=BLOCK, max_sequence_length=LONGEST, limit=n)
    workload = replayed(entries, like, n_cases=n_cases, speed=speed)(seed)
    most = like.n_output
    return [
        (
            trace.name,
            [msgspec.structs.replace(each, n_output=min(each.n_output, most)) for each in workload],
        )
    ]


async def _serve(
    url: str,
    model: str,
    loads: Sequence[Load],
    messages: Sequence[list[dict[str, Any]]],
    slo_s: float | None,
    extra: dict[str, Any],
    served: list[Served],
) -> None:
    """One load when the other has ended."""
    from dilaserve_bench.live.serve import body_of, serve_one

    async with connect_gateway(url) as client:
        found = await model_ids(client)
    body = body_of(messages, model or found[0], slo_s=slo_s, **extra)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        for name, workload in loads:
            task = progress.add_task(name, total=len(workload))
            served.append(
                await serve_one(
                    url,
                    workload,
                    body,
                    load=name,
                    slo_s=slo_s,
                    on_answer=lambda _, task=task: progress.advance(task),  # type: ignore[misc]
                )
            )


def _lines(served: Sequence[Served]) -> Iterator[str]:
    yield (
        "load                 rate      n  done  refused  failed  first text p50  p99 s  "
        "end p50  p99 s  attainment  threshold  late ms"
    )
    for row in (each.row for each in served):
        first, latency = row.first_text_s, row.latency_s
        yield (
            f"{row.load[:18]:18}  {row.rate:5.2f}  {row.n:5}  {row.n_done:4}  {row.n_refused:7}  "
            f"{row.n_failed:6}  {_s(first.p50):>14}  {_s(first.p99):>5}  {_s(latency.p50):>7}  "
            f"{_s(latency.p99):>5}  {row.attainment:10.3f}  {_s(row.mean_threshold):>9}  "
            f"{row.late_ms:7.1f}"
        )


def _tell_failure(served: Served) -> None:
    """The first answer that failed or was refused says why, on standard error."""
    row = served.row
    bad = [answer for answer in served.answers if answer.outcome != "done"]
    if bad:
        typer.echo(
            f"{row.load} at {row.rate:.2f} a second: {row.n_refused} refused and {row.n_failed} "
            f"failed, the first with: {bad[0].text.strip()[:MOST_OF_AN_ERROR] or 'nothing said'}",
            err=True,
        )


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _positive(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise typer.BadParameter(f"--rate {text!r} are not rates above 0; use for example 2,4")
    return values
