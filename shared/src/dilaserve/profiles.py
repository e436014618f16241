"""Latency profiles: seconds of a forward pass over n tokens, by TP degree (L_d, DESIGN section 5).

Read by scheduler, planner and twin; written by `dilaserve profile`. Knows no device.

The file is JSON, one `ProfileSet`:

    {"model": "LLaDA-8B-Instruct", "device": "H100", "source": "...", "licence": "...",
     "profiles": [{"tp_degree": 1, "points": [[32, 0.01218], [64, 0.01165, "cache", 2, 512], ...]}]}

A point is [n_tokens, seconds], and may go on with the step kind, the rows in the pass and the keys
that each row sees. Points may come in any order, and more than once for one number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import StepKind

__all__ = [
    "LatencyCurve",
    "LatencyProfile",
    "Point",
    "ProfileError",
    "ProfileSet",
    "load_profiles",
    "save_profiles",
]


MOST_TOKENS = 2**24
"""In a pass: a curve keeps a number for each."""
MOST_SECONDS = 86_400.0
"""Of a pass; far above any, and far from where sums overflow."""


class ProfileError(DiLaServeError):
    """A latency profile that cannot be used: not to be read, empty, or without the degree."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One measurement of a pass."""

    n_tokens: int
    """Tokens computed, over all rows."""
    seconds: float
    kind: StepKind | None = None
    """What all its rows were; None for any mixture."""
    n_rows: int | None = None
    n_keys: int | None = None
    """Tokens of each row's request, prompt and output: the keys that its tokens see."""


class LatencyProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one TP degree."""

    tp_degree: int
    points: list[Point]

    def curve(self, kind: StepKind | None = None) -> LatencyCurve:
        """Smoothed over all points or, where there are points of `kind`, over those alone."""
        of_kind = [p for p in self.points if kind is not None and p.kind == kind]
        return LatencyCurve((p.n_tokens, p.seconds) for p in of_kind or self.points)


class ProfileSet(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles of one model on one kind of device."""

    model: str
    device: str
    profiles: list[LatencyProfile]
    source: str = ""
    """Who measured it, and how."""
    licence: str = ""
    conditions: dict[str, str] = {}
    """What all points have in common beside the device: weights, type, cache mode and the like. A
    measurement that goes on must have the same."""

    @property
    def tp_degrees(self) -> list[int]:
        """Those that were measured, ascending."""
        return sorted(profile.tp_degree for profile in self.profiles)

    def curve(self, tp_degree: int, kind: StepKind | None = None) -> LatencyCurve:
        """L_d of one degree. Raises ProfileError for one that was not measured."""
        return self.of_degree(tp_degree).curve(kind)

    def of_degree(self, tp_degree: int) -> LatencyProfile:
        """All of one degree. Raises ProfileError for one that was not measured."""
        for profile in self.profiles:
            if profile.tp_degree == tp_degree:
                return profile
        raise ProfileError(
            f"the profile of {self.model} on {self.device} has no TP degree {tp_degree}, only "
            f"{', '.join(map(str, self.tp_degrees))}; measure it with `dilaserve profile`"
        )


class LatencyCurve:
    """Seconds of a pass over n tokens: never falling, an O(1) look-up up to the last measurement.

    Between two measurements it is linear; below the first it is the first, since a pass costs what
    it costs to start. Beyond the last it goes on with the mean slope of the upper half of what was
    measured: `is_measured` says where that begins.
    """

    __slots__ = ("_last_s", "_slope", "n_measured", "table")

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        knots = isotonic(_by_size(measured))
        self.table: tuple[float, ...] = tuple(_interpolate(knots))
        """Seconds by number of tokens, from 0 (which costs nothing) to `n_measured`."""
        self.n_measured = knots[-1][0]
        """Most tokens in a pass that was measured."""
        self._last_s = knots[-1][1]
        self._slope = self._upper_slope()

    def seconds(self, n_tokens: int) -> float:
        """Of one pass. ValueError below 0 tokens."""
        if n_tokens < 0:
            raise ValueError(f"a pass cannot have {n_tokens} tokens")
        if n_tokens <= self.n_measured:
            return self.table[n_tokens]
        return self._last_s + self._slope * (n_tokens - self.n_measured)

    def is_measured(self, n_tokens: int) -> bool:
        """Whether `seconds` interpolates rather than extrapolates."""
        return n_tokens <= self.n_measured

    def _upper_slope(self) -> float:
        half = self.n_measured // 2
        if half == 0:
            return self._last_s
        return (self._last_s - self.table[half]) / (self.n_measured - half)


def load_profiles(path: Path) -> ProfileSet:
    """Read a file. Raises ProfileError, naming it."""
    try:
        profiles = msgspec.json.decode(path.read_bytes(), type=ProfileSet)
    except OSError as error:
        raise ProfileError(
            f"latency profile {path} cannot be read: {error.strerror}; give a file that "
            "`dilaserve profile` wrote"
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProfileError(
            f"latency profile {path} is malformed: {error}; give a file that `dilaserve profile` "
            "wrote"
        ) from error
    if not profiles.profiles:
        raise ProfileError(f"latency profile {path} holds no profile; measure it again")
    return profiles


def save_profiles(profiles: ProfileSet, path: Path) -> None:
    """Write a file, one line a point; whoever reads meanwhile sees the old one or the new one.
    Raises ProfileError, naming it."""
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_text(_as_json(profiles))
        scratch.replace(path)
    except OSError as error:
        raise ProfileError(
            f"latency profile {path} cannot be written: {error.strerror}; give another file"
        ) from error


def isotonic(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The non-decreasing values nearest to the given ones in least squares, by pool-adjacent-
    violators. `points`: (x, value, weight), x ascending."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, number of points
    for _, value, weight in points:
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _merge(pools.pop(), pool)
        pools.append(pool)
    means = [mean for mean, _, n_points in pools for _ in range(n_points)]
    return [(x, mean) for (x, _, _), mean in zip(points, means, strict=True)]


def _as_json(profiles: ProfileSet) -> str:
    names = [name for name in profiles.__struct_fields__ if name != "profiles"]
    head = msgspec.json.encode({name: getattr(profiles, name) for name in names}).decode()
    parts = []
    for profile in profiles.profiles:
        points = ",\n".join(msgspec.json.encode(point).decode() for point in profile.points)
        parts.append(f'{{"tp_degree":{profile.tp_degree},"points":[\n{points}\n]}}')
    joined = ",\n".join(parts)
    return f'{head[:-1]},"profiles":[\n{joined}\n]}}\n'


def _merge(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    weight = a[1] + b[1]
    return (a[0] * a[1] + b[0] * b[1]) / weight, weight, a[2] + b[2]


def _by_size(measured: Iterable[tuple[int, float]]) -> list[tuple[int, float, int]]:
    """(tokens, mean seconds, measurements), ascending."""
    points = sorted(measured)
    if not points:
        raise ProfileError("a latency profile needs at least one point; measure it again")
    for n_tokens, seconds in points:
        if not (1 <= n_tokens <= MOST_TOKENS and 0 < seconds <= MOST_SECONDS):
            raise ProfileError(
                f"a pass over {n_tokens} tokens in {seconds} s cannot have been measured; "
                "remove that point from the latency profile"
            )
    sizes = []
    for n_tokens, group in groupby(points, key=lambda point: point[0]):
        values = [seconds for _, seconds in group]
        sizes.append((n_tokens, sum(values) / len(values), len(values)))
    return sizes


def _interpolate(knots: list[tuple[int, float]]) -> list[float]:
    first_n, first_s = knots[0]
    table = [0.0] + [first_s] * first_n
    for (low_n, low_s), (high_n, high_s) in pairwise(knots):
        slope = (high_s - low_s) / (high_n - low_n)
        table += [low_s + slope * (n - low_n) for n in range(low_n + 1, high_n)]
        table.append(high_s)
    return table
