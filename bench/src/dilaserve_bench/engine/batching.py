"""Continuous batches against static ones, on requests of mixed length."""

from __future__ import annotations

import statistics
import time
from itertools import islice

import msgspec

from dilaserve_bench.engine.feed import Feed, Work, requests_of
from dilaserve_gpu_worker.engine.engine import Engine

__all__ = ["Batching", "measure_batching"]


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted tokens a second; medians over rounds that alternate."""

    concurrency: int
    n_requests: int
    continuous: float
    """Where one request ends, the next one starts."""
    static: float
    """The next batch starts when the slowest request of this one has ended; those that end early
    leave it."""
    padded: float
    """Static, and every canvas is as long as the longest, as the reference implementations do."""
    over_static: float
    over_padded: float


def measure_batching(
    engine: Engine, work: Work, *, concurrency: int, n_requests: int, n_rounds: int
) -> Batching:
    """The same requests in each of the three ways."""
    longest = max(work.outputs)
    rounds = [
        (
            _speed(engine, work, concurrency, n_requests),
            _speed(engine, work, concurrency, n_requests, is_continuous=False),
            _speed(engine, work, concurrency, n_requests, is_continuous=False, canvas=longest),
        )
        for _ in range(n_rounds)
    ]
    continuous, static, padded = (statistics.median(way) for way in zip(*rounds, strict=True))
    return Batching(
        concurrency=concurrency,
        n_requests=n_requests,
        continuous=continuous,
        static=static,
        padded=padded,
        over_static=statistics.median(c / s for c, s, _ in rounds),
        over_padded=statistics.median(c / p for c, _, p in rounds),
    )


def _speed(
    engine: Engine,
    work: Work,
    concurrency: int,
    n_requests: int,
    *,
    is_continuous: bool = True,
    canvas: int | None = None,
) -> float:
    requests = islice(requests_of(work, canvas=canvas), n_requests)
    feed = Feed(engine, requests, concurrency, is_continuous=is_continuous)
    start = time.perf_counter()
    while feed.fill():
        output = engine.step()
        assert output is not None
        feed.drop_finished(output)
    n_wanted = sum(work.outputs[number % len(work.outputs)] for number in range(n_requests))
    return n_wanted / (time.perf_counter() - start)
