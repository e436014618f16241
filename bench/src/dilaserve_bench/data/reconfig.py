"""What the paper's planner chose, as far as it is published (reconfig_published.json)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dilaserve_bench.data import data_file

__all__ = ["DEGREES", "PublishedPlans", "published_plans"]

DEGREES = (1, 2, 4)
Counts = tuple[int, int, int]
"""Instances of each of DEGREES."""


class PublishedPlans(msgspec.Struct, frozen=True, kw_only=True):
    """Mixes of 16 GPUs by peak of the day, and of the headline trace by the minute from which on
    they ran."""

    source: str
    slot_s: float
    peak: float
    """Of `rates`."""
    rates: list[float]
    """Arrivals a second in each slot."""
    chosen: dict[int, list[Counts]]
    """By peak, for each slot: from the arrivals of the slot before it. The first is where it
    starts."""
    traced: list[tuple[float, Counts]]

    def at_rate(self, rate: float) -> Counts:
        """What it chose at the load that is the nearest to this one (arrivals a second)."""
        return min(self._choices(), key=lambda choice: abs(choice[0] - rate))[1]

    def at_minute(self, minute: float) -> Counts:
        """What ran in the headline trace."""
        return [counts for since, counts in self.traced if since <= minute][-1]

    def _choices(self) -> Iterator[tuple[float, Counts]]:
        """(arrivals a second that it had seen, what it chose)."""
        for peak, mixes in self.chosen.items():
            for rate, counts in zip(self.rates, mixes[1:], strict=False):
                yield rate * peak / self.peak, counts


def published_plans() -> PublishedPlans:
    """The paper's Figures 12 and 8."""
    return msgspec.json.decode(
        data_file("reconfig_published.json").read_bytes(), type=PublishedPlans
    )
