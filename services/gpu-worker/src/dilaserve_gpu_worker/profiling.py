"""Measures how long an engine's passes take, by step kind, rows and tokens.

A pass here is what the service pays for: plan, forward and unmask. Knows no file and no TP degree.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dilaserve.messages import CacheMode, StepKind
from dilaserve.profiles import Point
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.models.config import ModelConfig

__all__ = ["FEWEST_PASSES", "Effort", "Grid", "Load", "left_out", "loads_of", "measure"]

ONE_TOKEN = 1.0
"""No confidence exceeds it, so that a block of B tokens has B - 1 cache steps."""
FEWEST_PASSES = 3
"""Of which a median is taken, however long they take."""
WITHOUT_END = 2**31


@dataclass(frozen=True, slots=True)
class Grid:
    """What is to be measured."""

    lengths: Sequence[int]
    """Tokens of a request, prompt and output."""
    rows: Sequence[int]
    n_output: int
    """Most tokens of a request's output; the model looks at their confidence, too."""
    block_length: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How often a pass is repeated."""

    n_warm_up: int
    n_passes: int
    seconds: float
    """After so long, FEWEST_PASSES are enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """`n_rows` requests of one length, in a step of one kind."""

    kind: StepKind
    n_rows: int
    length: int
    n_tokens: int
    """Tokens computed."""

    @property
    def key(self) -> tuple[StepKind | None, int, int | None, int | None]:
        """What identifies its point."""
        return self.kind, self.n_tokens, self.n_rows, self.length


def loads_of(grid: Grid, cache_mode: CacheMode, limits: Limits) -> list[Load]:
    """Every load of the grid that fits into a pass and into the KV pool, small ones first.

    Without a cache there are no cache steps; in `prefix` mode they compute the whole output.
    """
    loads = _all_loads(grid, cache_mode)
    fitting = (load for load in loads if _why_not(load, limits) is None)
    return sorted(fitting, key=lambda load: (load.kind, load.length, load.n_rows))


def left_out(grid: Grid, cache_mode: CacheMode, limits: Limits) -> list[str]:
    """The loads of the grid that are not measured, a line for each reason and kind."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for load in _all_loads(grid, cache_mode):
        reason = _why_not(load, limits)
        if reason is None:
            continue
        if load.length > min(limits.max_sequence_length, limits.max_batch_tokens):
            found.setdefault((reason, "lengths"), {})[str(load.length)] = None
        else:
            found.setdefault((reason, load.kind), {})[f"{load.n_rows} x {load.length}"] = None
    return [f"{what} {', '.join(parts)}: {reason}" for (reason, what), parts in found.items()]


def measure(engine: Engine, config: ModelConfig, grid: Grid, load: Load, effort: Effort) -> Point:
    """The median pass of a load. The engine must be empty, and is empty again, come what may."""
    requests = _requests(config, grid, load)
    passes = _cache_passes if load.kind == "cache" else _recompute_passes
    try:
        taken = _take(passes(engine, requests), effort)
    finally:
        _remove(engine, requests)
    seconds = round(statistics.median(taken), 7)
    return Point(load.n_tokens, seconds, load.kind, load.n_rows, load.length)


def _take(passes: Iterator[float], effort: Effort) -> list[float]:
    """Seconds of the passes after the warm-up."""
    taken: list[float] = []
    for number, seconds in enumerate(passes):
        if number >= effort.n_warm_up:
            taken.append(seconds)
        is_long = len(taken) >= FEWEST_PASSES and sum(taken) >= effort.seconds
        if is_long or len(taken) == effort.n_passes:
            break
    return taken


def _recompute_passes(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[float]:
    """The first step of all requests at once, again and again."""
    while True:
        _add(engine, requests)
        yield _one_pass(engine, len(requests)).latency_s
        _remove(engine, requests)


def _cache_passes(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[float]:
    """The cache steps of the first block, which the first steps prepare in as many passes as they
    need; then from the start."""
    while True:
        _add(engine, requests)
        while engine.step() is not None:
            pass
        n_steps, n_left = 1, WITHOUT_END
        while n_left > 1:  # a step unmasks one: so another is left for it
            n_steps += 1
            for request in requests:
                engine.set_credit(request.request_id, Credit(ONE_TOKEN, WITHOUT_END, n_steps))
            output = _one_pass(engine, len(requests))
            yield output.latency_s
            n_left = min(step.n_block_masked for step in output.steps)
        _remove(engine, requests)


def _one_pass(engine: Engine, n_rows: int) -> BatchOutput:
    output = engine.step()
    if output is None or len(output.steps) != n_rows:
        n_run = len(output.steps) if output else 0
        raise RuntimeError(f"{n_rows} rows were to run in one pass, {n_run} did")
    return output


def _add(engine: Engine, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        engine.add(request)
        engine.set_credit(request.request_id, Credit(ONE_TOKEN, WITHOUT_END, 1))


def _remove(engine: Engine, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        engine.remove(request.request_id)


def _why_not(load: Load, limits: Limits) -> str | None:
    """What a load exceeds; None where it fits."""
    if load.length > limits.max_sequence_length:
        return f"above the model's {limits.max_sequence_length} tokens"
    if max(load.length, load.n_tokens) > limits.max_batch_tokens:
        return f"above the {limits.max_batch_tokens} tokens of a pass (--max-batch-tokens)"
    n_kv_tokens = limits.n_kv_tokens
    if n_kv_tokens is not None and load.n_rows * load.length > n_kv_tokens:
        return f"above the KV pool of {n_kv_tokens} tokens"
    return None


def _all_loads(grid: Grid, cache_mode: CacheMode) -> list[Load]:
    kinds: tuple[StepKind, ...] = ("recompute",) if cache_mode == "none" else ("recompute", "cache")
    return [
        Load(kind, n_rows, length, n_rows * _row_tokens(grid, kind, cache_mode, length))
        for kind in kinds
        for length in grid.lengths
        for n_rows in grid.rows
    ]


def _row_tokens(grid: Grid, kind: StepKind, cache_mode: str, length: int) -> int:
    if kind == "recompute":
        return length
    n_output = _n_output(grid, length)
    return n_output if cache_mode == "prefix" else min(grid.block_length, n_output)


def _n_output(grid: Grid, length: int) -> int:
    """Half of a short request, in whole blocks where it has one."""
    n_output = min(grid.n_output, length // 2)
    return max(n_output - n_output % grid.block_length, min(grid.block_length, length))


def _requests(config: ModelConfig, grid: Grid, load: Load) -> list[EngineRequest]:
    """Prompts of random tokens, the same at every time."""
    n_output = _n_output(grid, load.length)
    spec = DecodingSpec(n_output=n_output, block_length=grid.block_length, seed=0, ignore_eos=True)
    draw = np.random.default_rng([load.n_rows, load.length])
    prompts = draw.integers(0, config.vocab_size, (load.n_rows, load.length - n_output))
    return [
        EngineRequest(
            f"profile-{row}", prompt, spec, 0, [MASKED] * n_output, Credit(ONE_TOKEN, WITHOUT_END)
        )
        for row, prompt in enumerate(prompts.tolist())
    ]
