"""Which instances run and are not heard: their process is stopped, or stuck, and holds its GPUs.

Sans-IO. Silence counts only while others are heard: where nobody is, the bus may be to blame.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Silence"]

MOST_S = 5.0
"""What counts at most from one sign of life of somebody to the next."""


class Silence:
    """`limit_s`: for one that was heard before; `launch_s`: for one that never was, and may be
    loading. In seconds; a limit of 0 never ends."""

    def __init__(self, limit_s: float, launch_s: float) -> None:
        self._limit_s = limit_s
        self._launch_s = max(launch_s, limit_s)
        self._known: set[str] = set()
        """That were ever heard."""
        self._heard: set[str] = set()
        """Since the last look; as is `_anybody`."""
        self._anybody = False
        self._silent_s: dict[str, float] = {}
        self._counted_s: float | None = None
        """Up to when silence is counted."""

    def heard(self, name: str = "") -> None:
        """A sign of life of this instance, or of somebody else."""
        self._anybody = True
        if name:
            self._heard.add(name)

    def look(self, now: float, running: Iterable[str]) -> list[str]:
        """Those of `running` that have been silent for too long."""
        passed_s = 0.0
        if self._anybody or self._counted_s is None:
            passed_s = 0.0 if self._counted_s is None else min(now - self._counted_s, MOST_S)
            self._counted_s = now
        self._silent_s = {
            name: 0.0 if name in self._heard else self._silent_s.get(name, 0.0) + passed_s
            for name in running
        }
        self._known = (self._known | self._heard) & self._silent_s.keys()
        self._anybody, self._heard = False, set()
        if self._limit_s <= 0.0:
            return []
        return [name for name, silent_s in self._silent_s.items() if silent_s >= self._limit(name)]

    def _limit(self, name: str) -> float:
        return self._limit_s if name in self._known else self._launch_s
