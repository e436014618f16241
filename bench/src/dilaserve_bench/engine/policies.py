"""What a plan policy does to the requests of an engine: throughput, pauses between steps, latency.

A closed load: where a request ends, the next one is handed to the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np

from dilaserve_bench.engine.feed import Feed, Work, requests_of
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName
from dilaserve_gpu_worker.engine.types import EngineRequest

__all__ = ["PolicyRow", "measure_policies"]


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One plan policy. Samples of all rounds together, but for the throughput: a median."""

    plan_policy: str
    concurrency: int
    n_requests: int
    tokens_per_s: float
    n_passes: int
    """Of a round."""
    pass_ms: float
    pass_p99_ms: float
    gap_ms: float
    """From a request's step before to the end of its cache step: what a client waits for."""
    gap_p99_ms: float
    request_ms: float
    """From when it was handed over to its end."""
    request_p99_ms: float


@dataclass(slots=True)
class _Seen:
    """Seconds."""

    rounds: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)


def measure_policies(
    engines: Mapping[PlanPolicyName, Engine],
    work: Work,
    *,
    concurrency: int,
    n_requests: int,
    n_rounds: int,
    clock: Callable[[], float],
    reached: Callable[[], None] = lambda: None,
) -> list[PolicyRow]:
    """The same requests under each policy, in rounds that alternate. `engines` are empty, and are
    empty again. `reached` is called after each policy of each round."""
    seen = {name: _Seen() for name in engines}
    for _ in range(n_rounds):
        for name, engine in engines.items():
            _run(engine, work, concurrency, n_requests, seen[name], clock)
            reached()
    n_tokens = sum(work.outputs[number % len(work.outputs)] for number in range(n_requests))
    return [
        PolicyRow(
            plan_policy=name,
            concurrency=concurrency,
            n_requests=n_requests,
            tokens_per_s=n_tokens / statistics.median(each.rounds),
            n_passes=len(each.passes) // n_rounds,
            pass_ms=_mean_ms(each.passes),
            pass_p99_ms=_p99_ms(each.passes),
            gap_ms=_mean_ms(each.gaps),
            gap_p99_ms=_p99_ms(each.gaps),
            request_ms=_mean_ms(each.requests),
            request_p99_ms=_p99_ms(each.requests),
        )
        for name, each in seen.items()
    ]


def _run(
    engine: Engine,
    work: Work,
    concurrency: int,
    n_requests: int,
    seen: _Seen,
    clock: Callable[[], float],
) -> None:
    """Until all have ended."""
    handed_over: dict[str, float] = {}
    stepped: dict[str, float] = {}
    requests = _noted(islice(requests_of(work), n_requests), handed_over, clock)
    feed = Feed(engine, requests, concurrency)
    begin = before = clock()
    while feed.fill():
        output = engine.step()
        assert output is not None
        now = clock()
        seen.passes.append(now - before)
        for step in output.steps:
            if step.kind == "cache":
                seen.gaps.append(now - stepped[step.request_id])
            stepped[step.request_id] = now
        seen.requests += [now - handed_over[name] for name in feed.drop_finished(output)]
        before = clock()
    seen.rounds.append(clock() - begin)


def _noted(
    requests: Iterator[EngineRequest], taken: dict[str, float], clock: Callable[[], float]
) -> Iterator[EngineRequest]:
    """The same requests; `taken` gets the time at which each was."""
    for request in requests:
        taken[request.request_id] = clock()
        yield request


def _mean_ms(seconds: list[float]) -> float:
    return 1000 * statistics.fmean(seconds)


def _p99_ms(seconds: list[float]) -> float:
    return 1000 * float(np.quantile(seconds, 0.99))
