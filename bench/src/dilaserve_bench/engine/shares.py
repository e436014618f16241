"""What the passes of a bare engine take, part by part, and beside them the bare products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from dilaserve_bench.engine.bare import BareProducts
from dilaserve_bench.engine.feed import Feed
from dilaserve_gpu_worker.engine.batch import Batch, build_batch
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.models.model import Model

__all__ = ["KERNELS", "Clock", "EngineRow", "Left", "measure_row", "profile_left"]

KERNELS = (
    *("::mm", "::addmm", "::bmm", "::linear", "::mkldnn_linear", "::_linear_pointwise"),
    "scaled_dot_product",
)
"""Operators of matrix products and attention, by the ends or parts of their names."""
N_LEFT = 12

Clock = Callable[[], float]
"""Seconds."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over rounds of passes. Shares are those of a step: plan, forward and unmask."""

    mode: str
    concurrency: int
    tokens_per_s: float
    """Unmasked."""
    step_ms: float
    outside_forward: float
    outside_kernels: float
    """Not in matrix products or attention, by torch's profiler, whose own cost is in it."""
    of_bare: float
    """Throughput by that of the matrix products and the attention alone, at the same shapes and
    with the products that the engine calls, of packed matrices where its own are."""
    of_torch: float
    """The same with products as torch computes them by itself (F.linear): above 1 where the engine
    computes them faster, and `of_bare` where its matrices are plain."""


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step goes that is in no matrix product and no attention."""

    operator: str
    share: float
    calls: float
    """A step."""


@dataclass(frozen=True, slots=True)
class _Beside:
    """What is timed beside a pass."""

    plain: BareProducts
    packed: BareProducts | None
    """None where the engine's own are plain."""


@dataclass(slots=True)
class _Round:
    step_s: float = 0.0
    forward_s: float = 0.0
    plain_s: float = 0.0
    own_s: float = 0.0
    """With products as the engine's own."""
    n_tokens: int = 0


def measure_row(
    model: Model,
    engine: Engine,
    feed: Feed,
    *,
    name: tuple[str, int],
    n_passes: int,
    n_rounds: int,
    clock: Clock,
    reached: Callable[[], None] = lambda: None,
) -> tuple[EngineRow, list[Left]]:
    """Rounds of `n_passes` each, after one to warm up; every round is followed by the bare products
    at the shapes of its passes, so that both see the same machine, each after a pass that brings
    what it reads into the caches. `name`: mode and concurrency. `reached` is called after each of
    the `n_rounds` + 2 parts: the last one is the profiler's."""
    packed = BareProducts(model, is_packed=True) if model.is_packed else None
    beside = _Beside(BareProducts(model), packed)
    device_clock = _waiting(clock, model.device)
    _, *rounds = [
        _round(engine, feed, beside, n_passes, device_clock, reached) for _ in range(1 + n_rounds)
    ]
    left = profile_left(engine, feed, n_passes * n_rounds, model.device)
    reached()
    row = EngineRow(
        mode=name[0],
        concurrency=name[1],
        tokens_per_s=_median(rounds, lambda r: r.n_tokens / r.step_s),
        step_ms=_median(rounds, lambda r: 1000 * r.step_s / n_passes),
        outside_forward=_median(rounds, lambda r: 1 - r.forward_s / r.step_s),
        outside_kernels=sum(each.share for each in left),
        of_bare=_median(rounds, lambda r: r.own_s / r.step_s),
        of_torch=_median(rounds, lambda r: r.plain_s / r.step_s),
    )
    return row, left[:N_LEFT]


def profile_left(engine: Engine, feed: Feed, n_passes: int, device: torch.device) -> list[Left]:
    """All that is no kernel, most expensive first; what no operator accounts for is `host`."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    feed.fill()
    wall_us = 0.0
    with profile(activities=activities) as profiler:
        for _ in range(n_passes):
            start = time.perf_counter()
            output = engine.step()
            wall_us += 1e6 * (time.perf_counter() - start)
            assert output is not None
            feed.drop_finished(output)
            feed.fill()
    seen = {
        event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
        for event in profiler.key_averages()
    }
    other = {name: value for name, value in seen.items() if not _is_kernel(name)}
    left = [
        Left(operator=name, share=micros / wall_us, calls=event.count / n_passes)
        for name, (micros, event) in other.items()
    ]
    host = 1 - sum(micros for micros, _ in seen.values()) / wall_us
    left.append(Left(operator="host", share=max(host, 0.0), calls=1.0))
    return sorted(left, key=lambda each: -each.share)


def _round(
    engine: Engine,
    feed: Feed,
    beside: _Beside,
    n_passes: int,
    clock: Clock,
    reached: Callable[[], None],
) -> _Round:
    _pass(engine, feed, _Round(), beside.plain.shift, clock)
    taken = _Round()
    batches = [_pass(engine, feed, taken, beside.plain.shift, clock) for _ in range(n_passes)]
    taken.plain_s = _seconds(beside.plain, batches, clock)
    taken.own_s = _seconds(beside.packed, batches, clock) if beside.packed else taken.plain_s
    reached()
    return taken


def _seconds(products: BareProducts, batches: Sequence[Batch], clock: Clock) -> float:
    products.warm_up(batches)
    start = clock()
    for batch in batches:
        products.run(batch)
    return clock() - start


def _pass(engine: Engine, feed: Feed, taken: _Round, shift: int, clock: Clock) -> Batch:
    feed.fill()
    start = clock()
    plan = engine.plan()
    taken.step_s += clock() - start
    assert plan is not None
    batch = build_batch(plan.rows, shift)
    begun = clock()
    scores = engine.forward(plan)
    computed = clock()
    output = engine.unmask(plan, scores)
    taken.step_s += clock() - begun
    taken.forward_s += computed - begun
    taken.n_tokens += sum(len(step.positions) for step in output.steps)
    feed.drop_finished(output)
    return batch


def _is_kernel(name: str) -> bool:
    return any(name.endswith(k) or (k == KERNELS[-1] and k in name) for k in KERNELS)


def _waiting(clock: Clock, device: torch.device) -> Clock:
    """The clock, read when the device has done what it was told."""
    if device.type != "cuda":
        return clock

    def wait_and_read() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return wait_and_read


def _median(rounds: Sequence[_Round], value: Callable[[_Round], float]) -> float:
    return statistics.median(value(each) for each in rounds)
