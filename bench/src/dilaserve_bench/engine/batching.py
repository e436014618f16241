"""Continuous batches against static ones, on requests of mixed length."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import islice

import msgspec

from dilaserve.messages import CacheMode
from dilaserve_bench.engine.feed import Feed, Work, requests_of
from dilaserve_bench.engine.riders import Riders
from dilaserve_gpu_worker.engine.engine import Engine

__all__ = ["Batching", "measure_batching"]


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted tokens a second; medians over rounds that alternate."""

    concurrency: int
    n_requests: int
    continuous: float
    """Where one request ends, the next one starts."""
    static: float
    """The next batch starts when the slowest request of this one has ended. The batch keeps its
    size until then: rows of those that have ended are computed in every pass, see Riders."""
    leaving: float
    """The same, but those that end early leave their batch: less than any static batch costs."""
    padded: float
    """The next batch starts when all have ended, and every canvas is as long as the longest, as in
    the reference implementations."""
    over_static: float
    over_leaving: float
    over_padded: float
    fewer_passes: float
    """Passes of static batches by those of continuous ones: the gain where a pass takes as long
    however many rows it has, as small ones do on a GPU."""


def measure_batching(
    engine: Engine,
    work: Work,
    *,
    cache_mode: CacheMode,
    concurrency: int,
    n_requests: int,
    n_rounds: int,
    clock: Callable[[], float],
    reached: Callable[[], None] = lambda: None,
) -> Batching:
    """The same requests in each of the four ways. `cache_mode`: the engine's. `reached` is called
    after each way of each round."""

    def take(
        *, is_static: bool = False, riders: Riders | None = None, canvas: int | None = None
    ) -> tuple[float, int]:
        requests = islice(requests_of(work, canvas=canvas), n_requests)
        feed = Feed(engine, requests, concurrency, is_continuous=not is_static)
        taken = _take(engine, feed, riders, clock)
        reached()
        return taken

    rounds = [
        (
            take(),
            take(is_static=True, riders=Riders(engine, cache_mode)),
            take(is_static=True),
            take(is_static=True, canvas=max(work.outputs)),
        )
        for _ in range(n_rounds)
    ]
    n_wanted = sum(work.outputs[number % len(work.outputs)] for number in range(n_requests))
    ways = [[seconds for seconds, _ in way] for way in zip(*rounds, strict=True)]
    rates = [n_wanted / statistics.median(way) for way in ways]
    over = [statistics.median(map(_ratio, way, ways[0])) for way in ways]
    (_, n_continuous), (_, n_static), *_ = rounds[0]
    return Batching(
        concurrency=concurrency,
        n_requests=n_requests,
        continuous=rates[0],
        static=rates[1],
        leaving=rates[2],
        padded=rates[3],
        over_static=over[1],
        over_leaving=over[2],
        over_padded=over[3],
        fewer_passes=n_static / n_continuous,
    )


def _take(
    engine: Engine, feed: Feed, riders: Riders | None, clock: Callable[[], float]
) -> tuple[float, int]:
    """Seconds until all are done, and passes."""
    start, n_passes = clock(), 0
    while feed.fill():
        output = engine.step() if riders is None else riders.step()
        assert output is not None
        feed.drop_finished(output)
        if riders is not None and not feed.n_held:
            riders.clear()
        n_passes += 1
    return clock() - start, n_passes


def _ratio(seconds: float, least: float) -> float:
    return seconds / least
