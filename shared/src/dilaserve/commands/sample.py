"""The sample answer that `dilaserve up --sample` streams as proof that the stack serves."""

from __future__ import annotations

import time

import typer

from dilaserve.client import connect_gateway, model_ids, stream_chat

SAMPLE_PROMPT = "Running total of 3 5 2 7 1 8 6 4 9 2 5 3"


async def stream_sample(gateway_url: str) -> None:
    """Ask one question through the gateway and print the answer as it comes."""
    typer.echo(f"  > {SAMPLE_PROMPT}\n  ", nl=False)
    started = time.perf_counter()
    async with connect_gateway(gateway_url) as client:
        model = (await model_ids(client))[0]
        body = {"model": model, "messages": [{"role": "user", "content": SAMPLE_PROMPT}]}
        async for text in stream_chat(client, body):
            typer.echo(text, nl=False)
    elapsed_ms = 1000 * (time.perf_counter() - started)
    typer.echo(f"\n\n  streamed by {model} in {elapsed_ms:.0f} ms\n")
