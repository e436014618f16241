"""Continuous batches against static ones, on requests of mixed length."""

from __future__ import annotations

import statistics
from collections.abc import Callable
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
    engine: Engine,
    work: Work,
    *,
    concurrency: int,
    n_requests: int,
    n_rounds: int,
    clock: Callable[[], float],
) -> Batching:
    """The same requests in each of the three ways."""
    longest = max(work.outputs)
    rounds = [
        (
            _seconds(engine, _feed(engine, work, concurrency, n_requests), clock),
            _seconds(engine, _feed(engine, work, concurrency, n_requests, static=True), clock),
            _seconds(
                engine,
                _feed(engine, work, concurrency, n_requests, static=True, canvas=longest),
                clock,
            ),
        )
        for _ in range(n_rounds)
    ]
    n_wanted = sum(work.outputs[number % len(work.outputs)] for number in range(n_requests))
    continuous, static, padded = (statistics.median(way) for way in zip(*rounds, strict=True))
    return Batching(
        concurrency=concurrency,
        n_requests=n_requests,
        continuous=n_wanted / continuous,
        static=n_wanted / static,
        padded=n_wanted / padded,
        over_static=statistics.median(s / c for c, s, _ in rounds),
        over_padded=statistics.median(p / c for c, _, p in rounds),
    )


def _feed(
    engine: Engine,
    work: Work,
    concurrency: int,
    n_requests: int,
    *,
    static: bool = False,
    canvas: int | None = None,
) -> Feed:
    requests = islice(requests_of(work, canvas=canvas), n_requests)
    return Feed(engine, requests, concurrency, is_continuous=not static)


def _seconds(engine: Engine, feed: Feed, clock: Callable[[], float]) -> float:
    """Until all are done."""
    start = clock()
    while feed.fill():
        output = engine.step()
        assert output is not None
        feed.drop_finished(output)
    return clock() - start
