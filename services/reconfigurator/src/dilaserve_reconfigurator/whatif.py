"""What-if: workloads from a class mix or a trace, and nodes and mixes as they are written."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dilaserve_reconfigurator.monitor import Monitor, Workload
from dilaserve_reconfigurator.snapshot import PlanningError, RequestClass

__all__ = ["mix_workload", "parse_mix", "parse_nodes", "trace_workloads"]

SIGN_OF_LIFE_S = 1.0
"""Between two arrivals of a trace, since its silence is known to be silence."""
MAX_TRACE_S = 1e7
"""A third of a year; what is longer has a time that is wrong."""
MAX_NODES = 10_000


REMEDY = (
    'give a file such as {"classes": [[128, 256, 3.5]]}: tokens of prompt and output, and arrivals '
    "a second"
)


class _ClassMix(msgspec.Struct, frozen=True, kw_only=True):
    """(prompt length, output length, arrivals a second or share of them)."""

    classes: list[tuple[int, int, float]]


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    n_prompt: int
    n_output: int


def mix_workload(path: Path, *, slo_s: float, rate: float | None = None) -> Workload:
    """A file {"classes": [[prompt, output, rate], ...]}, scaled to `rate` arrivals a second in
    all. Raises PlanningError."""
    try:
        mix = msgspec.json.decode(path.read_bytes(), type=_ClassMix)
    except OSError as error:
        raise PlanningError(
            f"class mix {path} cannot be read: {error.strerror}; {REMEDY}"
        ) from error
    except msgspec.DecodeError as error:
        raise PlanningError(f"class mix {path} is malformed: {error}; {REMEDY}") from error
    total = sum(weight for _, _, weight in mix.classes)
    if not 0 < total < math.inf or any(weight < 0 or o < 1 for _, o, weight in mix.classes):
        raise PlanningError(f"class mix {path} needs outputs of a token at least, and some rates")
    factor = 1.0 if rate is None else rate / total
    classes = [
        RequestClass(n_prompt=p, n_output=o, slo_s=slo_s, rate=factor * weight)
        for p, o, weight in mix.classes
        if weight > 0
    ]
    return Workload(classes=tuple(classes), seen_s=0.0, n_requests=0)


def trace_workloads(
    path: Path, *, slo_s: float, interval_s: float, speed: float = 1.0
) -> Iterator[tuple[float, Workload]]:
    """What the monitor has seen at the end of each interval of a trace: seconds from its start,
    and the workload. Columns are Azure's, or at_s, n_prompt and n_output. Raises PlanningError."""
    if not (0.0 < interval_s < math.inf and 0.0 < speed < math.inf):
        raise PlanningError(f"interval {interval_s:g} s and speed {speed:g} have to be above 0")
    arrivals = sorted(_read(path), key=lambda arrival: arrival.at_s)
    if not arrivals:
        raise PlanningError(f"trace {path} holds no arrivals")
    first_s, clock_s, due_s = arrivals[0].at_s, 0.0, interval_s
    length_s = (arrivals[-1].at_s - first_s) / speed
    if length_s > MAX_TRACE_S:
        raise PlanningError(f"trace {path} is {length_s:g} s long, above {MAX_TRACE_S:g} s; cut it")
    monitor = Monitor(window_s=interval_s, gap_s=2 * SIGN_OF_LIFE_S, slo_s=slo_s)
    for number, arrival in enumerate(arrivals):
        at_s = (arrival.at_s - first_s) / speed
        while clock_s + SIGN_OF_LIFE_S < at_s:
            clock_s += SIGN_OF_LIFE_S
            monitor.alive(clock_s)
            if clock_s >= due_s:
                yield from _observed(monitor, due_s, clock_s)
                due_s += interval_s
        monitor.arrived(at_s, f"r{number}", arrival.n_prompt, arrival.n_output, slo_s)
    yield from _observed(monitor, due_s, length_s)


def parse_nodes(text: str) -> tuple[int, ...]:
    """`4x8` is four nodes of eight GPUs; several are separated by commas. Raises PlanningError."""
    nodes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]{1,6})", part.strip())
        n_nodes, n_gpus = (int(found[1] or 1), int(found[2])) if found is not None else (0, 0)
        if n_nodes < 1 or n_gpus < 1 or len(nodes) + n_nodes > MAX_NODES:
            raise PlanningError(
                f"nodes {text!r} are not written like 4x8 or 4x8,2x4, up to {MAX_NODES} of them"
            )
        nodes += [n_gpus] * n_nodes
    return tuple(nodes)


def parse_mix(text: str, degrees: Sequence[int]) -> Mapping[int, int]:
    """`8xtp1,2xtp4`: instances by TP degree, none for other degrees. Raises PlanningError."""
    counts = dict.fromkeys(degrees, 0)
    for part in filter(None, text.lower().replace("×", "x").split(",")):
        found = re.fullmatch(r"([0-9]{1,6})xtp-?([0-9]{1,6})", part.strip())
        if found is None or int(found[2]) not in counts:
            raise PlanningError(
                f"mix {text!r} is not written like 8xtp1,2xtp4 with TP degrees of {list(degrees)}"
            )
        counts[int(found[2])] += int(found[1])
    return counts


def _observed(monitor: Monitor, due_s: float, now: float) -> Iterator[tuple[float, Workload]]:
    workload = monitor.workload(now)
    if isinstance(workload, Workload):
        yield due_s, workload


def _read(path: Path) -> Iterator[_Arrival]:
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                yield _arrival(path, number, row)
    except OSError as error:
        raise PlanningError(f"trace {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanningError(f"trace {path} is no CSV file: {error}") from error


def _arrival(path: Path, line: int, row: Mapping[str, str]) -> _Arrival:
    try:
        if "TIMESTAMP" in row:
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
            return _plausible(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        return _plausible(float(row["at_s"]), int(row["n_prompt"]), int(row["n_output"]))
    except (KeyError, ValueError, TypeError) as error:
        raise PlanningError(
            f"trace {path}, line {line}: {error}; columns are TIMESTAMP, ContextTokens and "
            "GeneratedTokens, or at_s, n_prompt and n_output"
        ) from error


def _plausible(at_s: float, n_prompt: int, n_output: int) -> _Arrival:
    """Raises ValueError. Requests without output are in Azure's traces; the monitor skips them."""
    if not math.isfinite(at_s) or n_prompt < 0 or n_output < 0:
        raise ValueError(f"no request arrives at {at_s} with {n_prompt} + {n_output} tokens")
    return _Arrival(at_s, n_prompt, n_output)
