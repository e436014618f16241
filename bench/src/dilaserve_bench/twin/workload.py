"""What arrives, and when: the same for every policy that is tried with the same seed.

Times, sizes and cases are drawn from streams of their own, so that a change of one leaves the
others as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve_bench.twin.checks import MOST_REQUESTS
from dilaserve_bench.twin.traces import TraceEntry

__all__ = [
    "Arrival",
    "RequestClass",
    "Workload",
    "Workloads",
    "daily",
    "deal",
    "lasting",
    "poisson",
    "replayed",
]


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a virtual client."""

    request_id: str
    at_s: float
    n_prompt: int
    n_output: int
    case: int
    """Which recorded request it behaves like, or which problem it poses: an index."""
    slo_s: float | None = None
    priority: int = 0
    min_confidence: float | None = None


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one size; `weight` is their share among all classes, on any scale."""

    n_prompt: int
    n_output: int
    weight: float = 1.0
    slo_s: float | None = None
    priority: int = 0
    min_confidence: float | None = None


Workload = Sequence[Arrival]
"""In order of arrival."""

Workloads = Callable[[int], Workload]
"""By seed."""


def poisson(classes: Sequence[RequestClass], *, rate: float, n: int, n_cases: int) -> Workloads:
    """`n` arrivals at `rate` a second, without memory."""

    def draw(seed: int) -> Workload:
        rng = _stream(seed, "times")
        times = []
        time_s = 0.0
        for _ in range(n):
            time_s += rng.expovariate(rate)
            times.append(time_s)
        return _compose(seed, times, classes, n_cases)

    return draw


def daily(
    classes: Sequence[RequestClass],
    *,
    rates: Sequence[float],
    slot_s: float,
    n_cases: int,
    n: int | None = None,
) -> Workloads:
    """Arrivals without memory whose rate (a second) changes every `slot_s`; the first `n` of
    them, or all. Raises DiLaServeError for more than anybody could simulate."""
    expected = sum(rates) * slot_s
    if n is None and expected > MOST_REQUESTS:
        raise DiLaServeError(
            f"about {expected:.3g} requests arrive at these rates, more than {MOST_REQUESTS:.3g}; "
            "lower --speed, or limit them by --requests"
        )

    def draw(seed: int) -> Workload:
        times = _piecewise(_stream(seed, "times"), rates, slot_s)
        return _compose(seed, list(islice(times, n)), classes, n_cases)

    return draw


def replayed(
    entries: Sequence[TraceEntry], like: RequestClass, *, n_cases: int, speed: float = 1.0
) -> Workloads:
    """The arrivals of a trace, `speed` times as fast, with its sizes; everything else as in
    `like`. The seed only deals the cases."""

    def draw(seed: int) -> Workload:
        first_s = entries[0].at_s
        classes = [
            msgspec.structs.replace(like, n_prompt=entry.n_prompt, n_output=entry.n_output)
            for entry in entries
        ]
        times = ((entry.at_s - first_s) / speed for entry in entries)
        return _arrivals(seed, times, classes, n_cases)

    return draw


def lasting(workloads: Workloads, at_most_s: float) -> Workloads:
    """The same ones. Raises DiLaServeError, when they are drawn, for one that goes on for longer:
    a cluster that waits for ever beats its hearts for ever."""

    def draw(seed: int) -> Workload:
        workload = workloads(seed)
        last_s = workload[-1].at_s
        if last_s > at_most_s:
            raise DiLaServeError(
                f"the last request arrives after {last_s:.3g} virtual seconds, more than "
                f"{at_most_s:.3g}; raise --rate or --speed, or break off by --horizon"
            )
        return workload

    return draw


def deal(rng: random.Random, n_cases: int) -> Iterator[int]:
    """Cases in random order, each once before any comes again."""
    while True:
        deck = list(range(n_cases))
        rng.shuffle(deck)
        yield from deck


def _piecewise(rng: random.Random, rates: Sequence[float], slot_s: float) -> Iterator[float]:
    """Unit-rate arrivals on the clock that runs `rate` times as fast as time."""
    ahead = rng.expovariate(1.0)
    for slot, rate in enumerate(rates):
        while ahead < rate * slot_s:
            yield slot * slot_s + ahead / rate
            ahead += rng.expovariate(1.0)
        ahead -= rate * slot_s


def _compose(
    seed: int, times: Sequence[float], classes: Sequence[RequestClass], n_cases: int
) -> Workload:
    if not times:
        raise DiLaServeError("nobody arrives at these rates; raise --speed, or give another trace")
    weights = [each.weight for each in classes]
    drawn = _stream(seed, "sizes").choices(classes, weights, k=len(times))
    return _arrivals(seed, times, drawn, n_cases)


def _arrivals(
    seed: int, times: Iterable[float], classes: Sequence[RequestClass], n_cases: int
) -> Workload:
    cases = deal(_stream(seed, "cases"), n_cases)  # endless
    return [
        Arrival(
            request_id=f"r{number}",
            at_s=time_s,
            n_prompt=each.n_prompt,
            n_output=each.n_output,
            case=case,
            slo_s=each.slo_s,
            priority=each.priority,
            min_confidence=each.min_confidence,
        )
        for number, (time_s, each, case) in enumerate(zip(times, classes, cases, strict=False))
    ]


def _stream(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed}/{name}")
