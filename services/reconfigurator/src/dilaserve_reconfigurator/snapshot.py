"""What a plan is made for: the workload, the cluster's GPUs, and how fast the model is served.

Plain data and its arithmetic (paper, Table 1). Knows no model of the optimisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import CacheMode
from dilaserve.profiles import LatencyCurve, ProfileSet

__all__ = [
    "MAX_SIZES",
    "DegreeSpeed",
    "Pace",
    "PlanningError",
    "RequestClass",
    "Snapshot",
    "batch_sizes",
    "degree_speeds",
    "worthwhile",
]

NO_GAIN = 0.005
"""Costs a token that are nearer than this share are the same."""
MAX_RATE = 1e6
"""Requests a second of a class: far above any cluster, and within what solvers can scale."""
MAX_SIZES = 16
"""Batch sizes per degree and kind of step that the optimisation may choose from."""


class PlanningError(DiLaServeError):
    """Something for which no plan can be made: the operator's data or settings are wrong."""


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are alike; lengths in tokens. Raises PlanningError for what makes no sense."""

    n_prompt: int
    n_output: int
    slo_s: float
    rate: float
    """Arrivals a second."""

    def __post_init__(self) -> None:
        if self.n_prompt < 0 or self.n_output < 1 or not 0.0 < self.slo_s < math.inf:
            raise PlanningError(
                f"no request has {self.n_prompt} prompt and {self.n_output} output tokens within "
                f"{self.slo_s:g} s; give at least one output token, and an SLO above 0"
            )
        if not 0.0 < self.rate <= MAX_RATE:
            raise PlanningError(
                f"{self.rate:g} requests a second cannot be planned for; give a rate above 0 and "
                f"up to {MAX_RATE:g}"
            )

    @property
    def n_full(self) -> int:
        """Tokens of a recompute row: P + O."""
        return self.n_prompt + self.n_output


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """T_c: output tokens that a denoising step unmasks on average, at one threshold."""

    threshold: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class DegreeSpeed:
    """L_d of one TP degree, and the batch sizes (tokens in a pass) that its instances may run."""

    tp_degree: int
    recompute: LatencyCurve
    cache: LatencyCurve
    recompute_sizes: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    overhead: float = 1.0
    """Factor on the profile: what is lost beside the pass."""
    others: tuple[tuple[float, int], ...] = ()
    """How likely another row of a pass is to recompute, and with how many tokens, by class."""

    def recompute_s(self, size: int, n_row: int) -> float:
        """Seconds of a recompute pass in which a row of `n_row` tokens takes part. A row is not
        split: one above the batch size is a pass of its own."""
        return self.overhead * self.recompute.seconds(max(size, n_row))

    def cache_s(self, size: int, n_row: int) -> float:
        """Seconds of a cache pass in which a row of `n_row` tokens takes part."""
        return self.overhead * self.cache.seconds(max(size, n_row))

    def cache_wait_s(self, size: int, n_row: int) -> float:
        """Seconds until such a row's step is done. A pass waits for all of its rows, and now and
        then one of the others recomputes: that is paid for by its own step, but waited for by
        all."""
        size = max(size, n_row)
        alone = self.cache.seconds(size)
        longer = sum(
            share * max(self.recompute.seconds(size + n_full - n_row) - alone, 0.0)
            for share, n_full in self.others
        )
        return self.overhead * (alone + (size / n_row - 1.0) * longer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that Stage 1 is told. Raises PlanningError for what makes no sense."""

    classes: tuple[RequestClass, ...]
    nodes: tuple[int, ...]
    """GPUs of each node."""
    speeds: tuple[DegreeSpeed, ...]
    paces: tuple[Pace, ...]
    block_length: int = 32
    cache_mode: CacheMode = "dual"
    rate_factor: float = 1.5
    """Safety: rates are planned for as if they were this much higher."""

    def __post_init__(self) -> None:
        if not self.classes or not self.paces or not self.speeds:
            raise PlanningError("a plan needs at least one request class, threshold and TP degree")
        if any(smaller <= 0 or larger % smaller for smaller, larger in pairwise(self.degrees)):
            raise PlanningError(
                f"TP degrees {self.degrees} do not divide one another; use for example 1, 2 and 4"
            )
        if all(n_gpus < self.degrees[0] for n_gpus in self.nodes):
            raise PlanningError(f"no node of {list(self.nodes)} GPUs has room for an instance")

    @property
    def degrees(self) -> tuple[int, ...]:
        """D, ascending."""
        return tuple(sorted(speed.tp_degree for speed in self.speeds))

    @property
    def total_rate(self) -> float:
        """Arrivals a second, as measured."""
        return sum(each.rate for each in self.classes)

    def slots(self, tp_degree: int) -> int:
        """How many instances of one degree the nodes have room for."""
        return sum(n_gpus // tp_degree for n_gpus in self.nodes)

    def recompute_steps(self, each: RequestClass) -> int:
        """Blocks of a request, each of which starts with a recompute step."""
        return math.ceil(each.n_output / self.block_length)

    def tokens_per_step(self, each: RequestClass) -> tuple[float, ...]:
        """T_c for one class, in the order of `paces`: a step unmasks at most its block."""
        block = each.n_output / self.recompute_steps(each)
        return tuple(min(pace.tokens_per_step, block) for pace in self.paces)

    def step_bounds(self, each: RequestClass) -> tuple[float, float]:
        """Fewest and most steps of a request: at the fastest and the slowest threshold."""
        paces = self.tokens_per_step(each)
        return each.n_output / max(paces), each.n_output / min(paces)

    def n_cache_row(self, each: RequestClass) -> int:
        """Tokens of its row in a cache step: the block, or with the prefix cache the mean of what
        is left of the sequence from the block on."""
        block = min(self.block_length, each.n_output)
        return block if self.cache_mode == "dual" else (each.n_output + block) // 2


def degree_speeds(
    profiles: ProfileSet,
    classes: Sequence[RequestClass],
    *,
    degrees: Iterable[int],
    paces: Sequence[Pace],
    max_batch_tokens: int,
    block_length: int = 32,
    cache_mode: CacheMode = "dual",
    overhead: float = 1.0,
) -> tuple[DegreeSpeed, ...]:
    """The speed of each degree, with batch sizes that suit the workload. An instance holds full
    lengths of at most `max_batch_tokens`, so its cache passes have so many rows at most. How often
    rows recompute is taken at the slowest of `paces`. Raises ProfileError for a degree that was not
    measured."""
    pace = min(each.tokens_per_step for each in paces)
    shortest = min(each.n_full for each in classes)
    longest = max(max_batch_tokens, shortest)
    mean = sum(each.rate * each.n_full for each in classes) / sum(each.rate for each in classes)
    n_rows = max(int(longest / mean), 1)
    row = block_length if cache_mode == "dual" else max(int(mean / 2), 1)
    return tuple(
        DegreeSpeed(
            tp_degree=degree,
            recompute=profiles.curve(degree, "recompute"),
            cache=profiles.curve(degree, "cache"),
            recompute_sizes=worthwhile(
                batch_sizes(shortest, longest), profiles.curve(degree, "recompute")
            ),
            cache_sizes=worthwhile(
                [row * n for n in batch_sizes(1, n_rows)], profiles.curve(degree, "cache")
            ),
            overhead=overhead,
            others=_recomputing(classes, pace, block_length),
        )
        for degree in sorted(set(degrees))
    )


def batch_sizes(smallest: int, largest: int, n: int = MAX_SIZES) -> tuple[int, ...]:
    """At most `n` whole numbers between the two, each about the same factor above the last."""
    ratio = (largest / smallest) ** (1 / (n - 1))
    return tuple(sorted({round(smallest * ratio**i) for i in range(n)}))


def worthwhile(sizes: Sequence[int], curve: LatencyCurve) -> tuple[int, ...]:
    """Without the sizes that cost as much a token as a smaller one: they only take longer."""
    kept: list[int] = []
    lowest = math.inf
    for size in sizes:
        cost = curve.seconds(size) / size
        if cost < (1.0 - NO_GAIN) * lowest:
            kept.append(size)
            lowest = cost
    return tuple(kept)


def _recomputing(
    classes: Sequence[RequestClass], tokens_per_step: float, block_length: int
) -> tuple[tuple[float, int], ...]:
    """Of all steps, the share of recompute steps of each class; and their tokens."""
    n_blocks = [math.ceil(each.n_output / block_length) for each in classes]
    n_steps = sum(
        each.rate * max(each.n_output / tokens_per_step, blocks)
        for each, blocks in zip(classes, n_blocks, strict=True)
    )
    return tuple(
        (each.rate * blocks / n_steps, each.n_full)
        for each, blocks in zip(classes, n_blocks, strict=True)
    )
