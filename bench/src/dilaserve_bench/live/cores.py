"""Cores: one for the worker, the others for the rest, and how busy these are. Linux only."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dilaserve.errors import DiLaServeError

__all__ = ["CoreMeter", "apart", "parse_stat"]

IDLE = slice(3, 5)
"""Fields of /proc/stat: idle, and waiting for I/O."""
N_FIELDS = 8
"""Those behind count time that is in the others, too."""


@contextmanager
def apart() -> Iterator[int]:
    """Keep this process and its children off one core, and say which: it is the worker's. Raises
    DiLaServeError where there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise DiLaServeError("a live run needs two cores: one for the worker, one for the rest")
    os.sched_setaffinity(0, set(cores[1:]))
    try:
        yield cores[0]
    finally:
        os.sched_setaffinity(0, set(cores))


class CoreMeter:
    """How busy some cores are, with whatever, from now on."""

    def __init__(self, cores: Collection[int]) -> None:
        self._cores = set(cores)
        self._before = self._read()

    def busy(self) -> float:
        """Share of the time so far, over all of the cores."""
        (busy_0, total_0), (busy_1, total_1) = self._before, self._read()
        return (busy_1 - busy_0) / (total_1 - total_0) if total_1 > total_0 else 0.0

    def _read(self) -> tuple[int, int]:
        return parse_stat(Path("/proc/stat").read_text(), self._cores)


def parse_stat(text: str, cores: Collection[int]) -> tuple[int, int]:
    """(busy, total) ticks of some cores, from what /proc/stat says."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines()]
    ticks = [[int(field) for field in line[1:]][:N_FIELDS] for line in lines if line[0] in names]
    total = sum(map(sum, ticks))
    return total - sum(sum(each[IDLE]) for each in ticks), total
