"""Watches a stack's forward passes on the bus, and says how long they take.

A pass is paid for from one result to the next while there is work: that holds the forward pass and
all that the worker's process does beside it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage
from dilaserve.messages import StepResult, decode_worker_event

__all__ = ["SeenPass", "Turn", "seen", "turns", "watching_passes"]


class SeenPass(msgspec.Struct, frozen=True, kw_only=True):
    """One pass as its result told it."""

    at_s: float
    """When the result was read, on any clock."""
    instance_id: str
    batch: int
    latency_s: float
    """Plan, forward and unmask."""
    n_tokens: int
    n_rows: int
    n_steps: int
    """Rows that were no rebuilds."""
    n_new: int
    """Rows of requests that were loaded for this pass."""
    threshold_sum: float
    """Over the steps."""
    goes_on: bool
    """Whether the instance has work left that it may run at once."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A pass, and the seconds from the result before it to its own."""

    seconds: float
    seen: SeenPass


@asynccontextmanager
async def watching_passes(bus: Bus) -> AsyncIterator[list[SeenPass]]:
    """All passes of all instances from now on, in the order of their results."""
    passes: list[SeenPass] = []

    def read(message: BusMessage) -> None:
        event = decode_worker_event(message.data)
        if isinstance(event, StepResult) and event.n_tokens:
            passes.append(seen(event, time.perf_counter()))

    subscription = await bus.subscribe(subjects.event_step("*"), read)
    try:
        yield passes
    finally:
        await subscription.unsubscribe()


def seen(result: StepResult, at_s: float) -> SeenPass:
    """What of a result counts here."""
    return SeenPass(
        at_s=at_s,
        instance_id=result.instance_id,
        batch=result.batch,
        latency_s=result.latency_ms / 1000,
        n_tokens=result.n_tokens,
        n_rows=len(result.items) + result.n_rebuilds,
        n_steps=len(result.items),
        n_new=sum(item.step == 1 for item in result.items),
        threshold_sum=sum(item.threshold for item in result.items),
        goes_on=any(item.finish_reason is None for item in result.items),
    )


def turns(passes: Iterable[SeenPass]) -> list[Turn]:
    """Those of one instance that followed another without a rest."""
    return [
        Turn(seconds=later.at_s - earlier.at_s, seen=later)
        for earlier, later in pairwise(passes)
        if earlier.goes_on and later.batch == earlier.batch + 1
    ]
