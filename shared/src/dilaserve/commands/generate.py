"""`dilaserve generate`: one answer from the gateway, as text or as a canvas being denoised."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live

from dilaserve.client import connect_gateway, model_ids, stream_events, text_of
from dilaserve.commands.canvas import Canvas
from dilaserve.commands.options import GatewayUrl, command_name, gateway_url_or_found


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Show tokens appearing out of order.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model; default: the first served.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Length of the canvas.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of the sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Fill the whole canvas.")
    ] = False,
    slo_ms: Annotated[int | None, typer.Option(help="Latency objective, milliseconds.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    service_tier: Annotated[
        str | None, typer.Option(help="Priority and SLO by name: default, flex or priority.")
    ] = None,
    min_confidence: Annotated[
        float | None, typer.Option(help="Lowest confidence threshold to allow.")
    ] = None,
    url: GatewayUrl = None,
) -> None:
    """Stream an answer to a prompt."""
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
        "slo_ms": slo_ms,
        "priority": priority,
        "service_tier": service_tier,
        "min_confidence": min_confidence,
    }
    body = {"messages": [{"role": "user", "content": prompt}]} | {
        name: value for name, value in options.items() if value is not None
    }
    asyncio.run(_generate(gateway_url_or_found(url), body, watch))


async def _generate(url: str, body: dict[str, Any], watch: bool) -> None:
    async with connect_gateway(url) as client:
        if "model" not in body:
            body["model"] = (await model_ids(client))[0]
        await (_watch(client, body) if watch else _print(client, body))


async def _print(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    report: dict[str, Any] = {}
    async for event in stream_events(client, "/v1/chat/completions", body | {"stream": True}):
        typer.echo(text_of(event), nl=False)
        report = event.get("dilaserve", report)
    typer.echo()
    if report:
        typer.echo(summary(report), err=True)


def summary(report: dict[str, Any]) -> str:
    """One line on what an answer took, of the gateway's report."""
    steps = ", ".join(f"{n} {kind}" for kind, n in report["steps"].items() if n)
    text = f"{report['n_steps']} steps ({steps})" if steps else "no step"
    if report["migrations"]:
        text += f", {report['migrations']} migrations"
    if report["latency_ms"] is not None:
        text += f", {report['latency_ms']:.0f} ms"
    return text + _used(report)


async def _watch(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    console = Console(highlight=False)
    canvas = Canvas()
    request_id, used = "", ""
    started = time.perf_counter()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        async for event in stream_events(client, "/v1/denoise", body):
            if event["object"] == "denoise.start":
                canvas = Canvas(event["n_output"])
                request_id = event["id"]
            elif event["object"] == "denoise.step":
                canvas.apply(event)
                if console.is_terminal:
                    live.update(canvas.draw(), refresh=True)
                else:
                    console.print(f"step {canvas.n_steps}", canvas.draw(), sep="\n")
            elif event["object"] == "denoise.end":
                used = _used(event["dilaserve"])
    elapsed_ms = 1000 * (time.perf_counter() - started)
    console.print(canvas.draw(show_new=False))
    console.print(
        f"{canvas.n_tokens} tokens in {canvas.n_steps} steps, {elapsed_ms:.0f} ms{used}; "
        f"{command_name()} replay {request_id}",
        soft_wrap=True,
    )


def _used(report: dict[str, Any]) -> str:
    """Of the gateway's report, what a user turns."""
    mean = report["mean_threshold"]
    text = "" if mean is None else f", mean threshold {mean:.2f}"
    if report["slo_met"] is not None:
        text += f", SLO of {report['slo_ms']} ms {'met' if report['slo_met'] else 'missed'}"
    return text
