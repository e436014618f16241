"""The sample answer that `dilaserve up --sample` streams as proof that the stack serves."""

from __future__ import annotations

import time

import typer

from dilaserve.client import connect_gateway, model_ids, stream_chat

SAMPLE_PROMPT = "Running total of 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7 9 5"
"""A task of the bundled model; its answer is one digit per digit, modulo 10."""
SAMPLE_LENGTH = 32


async def stream_sample(gateway_url: str) -> None:
    """Ask one question through the gateway and print the answer as it comes."""
    typer.echo(f"  > {SAMPLE_PROMPT}\n  ", nl=False)
    started = time.perf_counter()
    async with connect_gateway(gateway_url) as client:
        model = (await model_ids(client))[0]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": SAMPLE_PROMPT}],
            "max_tokens": SAMPLE_LENGTH,
        }
        async for text in stream_chat(client, body):
            typer.echo(text, nl=False)
    elapsed_ms = 1000 * (time.perf_counter() - started)
    typer.echo(f"\n\n  streamed by {model} in {elapsed_ms:.0f} ms\n")
