"""Throughput of the whole stack against the bare engine loop, on the same requests.

`make bench`. The bare loop and the workers' engines run on core 0; all else runs on core 1: the
workers' other halves with their NATS and Redis clients, servers, scheduler, gateway and the clients
that read the streams. Rounds alternate between the bare loop and the stacks within one run, so that
only ratios are compared. Both keep the same number of requests going: where one ends, the next one
starts.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import msgspec
import typer

from dilaserve.embedded import free_port
from dilaserve.model_folder import find_model
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack
from dilaserve_gpu_worker.huge_pages import with_huge_pages

__all__ = ["main", "run"]

WORKER_CORE, OTHER_CORE = 0, 1
PROMPT = [5] * 32
N_OUTPUT = 96
TEMPERATURE = 1.0
"""Noise makes the tiny model unsure, so that requests take many steps."""
POLICY, THRESHOLD = "infaas", 0.9
"""The stack's, fixed, and the same for the bare loop: both have to do the same steps."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds."""

    mode: Literal["bare", "stack"]
    run_ahead: str
    """DILASERVE_RUN_AHEAD; empty for the bare loop."""
    tokens_per_s: float
    step_ms: float
    """Milliseconds of a pass of the bare loop, with all that lies between two passes."""
    ratio: float
    """Median over the rounds of tokens_per_s by that of the bare loop just before."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round took."""

    seconds: float
    n_tokens: int
    n_passes: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """`n_requests` in all, `concurrency` of them at a time."""

    n_requests: int
    concurrency: int


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind.")] = 5,
    model: Annotated[Path | None, typer.Option(help="Model folder.")] = None,
) -> None:
    """Measure, and print JSON."""
    rows = asyncio.run(run(find_model(model, os.environ), Load(requests, concurrency), rounds))
    typer.echo(msgspec.json.format(msgspec.json.encode({"rows": rows})).decode())


async def run(model: Path, load: Load, n_rounds: int) -> list[Row]:
    """Rows for the bare loop, and for stacks with run_ahead 1 and by default."""
    os.sched_setaffinity(0, {OTHER_CORE})
    async with AsyncExitStack() as cleanup:
        bare = await cleanup.enter_async_context(_bare_loop(model))
        stacks = {
            run_ahead: await cleanup.enter_async_context(_stack(model, run_ahead))
            for run_ahead in ("1", "block")
        }
        await _rounds(bare, stacks, load, 1)  # warm-up
        measured = await _rounds(bare, stacks, load, n_rounds)
    return _rows(measured)


Measured = dict[str, list[Round]]
"""Rounds by run_ahead; empty is the bare loop."""


async def _rounds(
    bare: asyncio.subprocess.Process, stacks: dict[str, Stack], load: Load, n_rounds: int
) -> Measured:
    measured: Measured = {"": [], **{run_ahead: [] for run_ahead in stacks}}
    for _ in range(n_rounds):
        measured[""].append(await _ask_bare(bare, load))
        for run_ahead, stack in stacks.items():
            measured[run_ahead].append(await _drive(stack, load))
    return measured


def _rows(measured: Measured) -> list[Row]:
    bare = measured[""]
    return [
        Row(
            mode="stack" if run_ahead else "bare",
            run_ahead=run_ahead,
            tokens_per_s=statistics.median(map(_speed, rounds)),
            step_ms=statistics.median(1000 * r.seconds / max(r.n_passes, 1) for r in bare),
            ratio=statistics.median(
                _speed(r) / _speed(b) for r, b in zip(rounds, bare, strict=True)
            ),
        )
        for run_ahead, rounds in measured.items()
    ]


def _speed(measured: Round) -> float:
    return measured.n_tokens / measured.seconds


# --- the stack ------------------------------------------------------------------------------------


@asynccontextmanager
async def _stack(model: Path, run_ahead: str) -> AsyncIterator[Stack]:
    environ = {
        **os.environ,
        variable("cpu_affinity"): str(WORKER_CORE),
        variable("threshold"): str(THRESHOLD),
    }
    with tempfile.TemporaryDirectory() as home:
        options = StackOptions(
            home=Path(home),
            model=model,
            port=free_port(),
            threads=1,
            policy=POLICY,
            run_ahead=run_ahead,
        )
        async with running_stack(options, environ=environ, log=_print_warning) as stack:
            yield stack


async def _drive(stack: Stack, load: Load) -> Round:
    """One round of streams through the gateway."""
    limits = httpx.Limits(max_connections=load.concurrency)
    url = stack.endpoints.gateway_url
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        seeds = iter(range(load.n_requests))
        model_name = Path(stack.state.model).name
        start = time.perf_counter()
        await asyncio.gather(*(_follow(client, model_name, seeds) for _ in range(load.concurrency)))
        seconds = time.perf_counter() - start
    return Round(seconds=seconds, n_tokens=load.n_requests * N_OUTPUT)


async def _follow(client: httpx.AsyncClient, model_name: str, seeds: Iterator[int]) -> None:
    """One client: streams, one after the other, until there are no seeds left."""
    for seed in seeds:
        body = {
            "model": model_name,
            "prompt": PROMPT,
            "max_tokens": N_OUTPUT,
            "temperature": TEMPERATURE,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
        if last != "data: [DONE]":
            raise RuntimeError(f"the stream with seed {seed} ended with {last!r}")


def _print_warning(name: str, line: str) -> None:
    if name == "supervisor" or "WARNING" in line or "ERROR" in line:
        sys.stderr.write(f"{name}: {line}\n")


# --- the bare loop, in a process of its own -------------------------------------------------------


@asynccontextmanager
async def _bare_loop(model: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name if __spec__ else __name__, "--bare", str(model)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=with_huge_pages(os.environ),  # as a worker's engine has it
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _ask_bare(process: asyncio.subprocess.Process, load: Load) -> Round:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{load.n_requests} {load.concurrency}\n".encode())
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the bare loop has ended; its error is above")
    return msgspec.json.decode(line, type=Round)


def _serve_bare(model: Path) -> None:
    """Answer a line "n_requests concurrency" with a Round, until the end of the input."""
    os.sched_setaffinity(0, {WORKER_CORE})
    denoise = _bare_engine(model)
    for line in sys.stdin:
        n_requests, concurrency = map(int, line.split())
        sys.stdout.buffer.write(msgspec.json.encode(denoise(Load(n_requests, concurrency))) + b"\n")
        sys.stdout.buffer.flush()


def _bare_engine(model: Path) -> Callable[[Load], Round]:
    from dilaserve.store.records import MASKED, DecodingSpec
    from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
    from dilaserve_gpu_worker.loading import load_engine
    from dilaserve_gpu_worker.settings import WorkerSettings

    engine, _ = load_engine(WorkerSettings(model=str(model), threads=1))

    def add(seed: int) -> None:
        spec = DecodingSpec(
            n_output=N_OUTPUT, block_length=32, seed=seed, temperature=TEMPERATURE, ignore_eos=True
        )
        credit = Credit(threshold=THRESHOLD, until_block=N_OUTPUT)
        canvas = [MASKED] * N_OUTPUT
        engine.add(EngineRequest(str(seed), PROMPT, spec, 0, canvas, credit))

    def denoise(load: Load) -> Round:
        seeds = iter(range(load.n_requests))
        start, n_passes = time.perf_counter(), 0
        for _, seed in zip(range(load.concurrency), seeds, strict=False):
            add(seed)
        while (output := engine.step()) is not None:
            n_passes += 1
            for step in output.steps:
                if step.finish_reason:
                    engine.remove(step.request_id)
                    if (following := next(seeds, None)) is not None:
                        add(following)
        seconds = time.perf_counter() - start
        return Round(seconds=seconds, n_tokens=load.n_requests * N_OUTPUT, n_passes=n_passes)

    return denoise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        _serve_bare(Path(sys.argv[2]))
    else:
        typer.run(main)
