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
    fewer_passes: float
    """Passes of static batches by those of continuous ones: the gain over static where a pass
    takes as long however many rows it has, as small ones do on a GPU."""


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
            _take(engine, _feed(engine, work, concurrency, n_requests), clock),
            _take(engine, _feed(engine, work, concurrency, n_requests, static=True), clock),
            _take(
                engine,
                _feed(engine, work, concurrency, n_requests, static=True, canvas=longest),
                clock,
            ),
        )
        for _ in range(n_rounds)
    ]
    n_wanted = sum(work.outputs[number % len(work.outputs)] for number in range(n_requests))
    continuous, static, padded = (
        statistics.median(seconds for seconds, _ in way) for way in zip(*rounds, strict=True)
    )
    (_, n_continuous), (_, n_static), _ = rounds[0]
    return Batching(
        concurrency=concurrency,
        n_requests=n_requests,
        continuous=n_wanted / continuous,
        static=n_wanted / static,
        padded=n_wanted / padded,
        over_static=statistics.median(s / c for (c, _), (s, _), _ in rounds),
        over_padded=statistics.median(p / c for (c, _), _, (p, _) in rounds),
        fewer_passes=n_static / n_continuous,
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


def _take(engine: Engine, feed: Feed, clock: Callable[[], float]) -> tuple[float, int]:
    """Seconds until all are done, and passes."""
    start, n_passes = clock(), 0
    while feed.fill():
        output = engine.step()
        assert output is not None
        feed.drop_finished(output)
        n_passes += 1
    return clock() - start, n_passes
