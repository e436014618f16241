"""Records the steps of served requests, from which a predictor can be trained anew.

Steps are collected from the workers' results; length, model and prompt come from the store when a
request has ended. Requests whose results did not all arrive are left out, as are those cancelled.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from dilaserve.errors import StoreUnavailableError
from dilaserve.messages import StepItemResult
from dilaserve.recording import RecordedStep, StepWriter, prompt_digest
from dilaserve.store import Store
from dilaserve.store.records import NewRequest

__all__ = ["BoundedFolder", "Collector", "TrafficRecorder"]

MOST_REQUESTS = 50_000
"""Requests collected at a time; the one silent for longest is forgotten first."""
N_FILES = 8
"""The space allowed is filled by so many files, of which the oldest goes when all is full."""

log = logging.getLogger(__name__)

Timed = tuple[StepItemResult, float]
"""A step and the milliseconds of its pass."""


class Collector:
    """The steps so far of all requests under way. Sans-IO."""

    def __init__(self, most_requests: int = MOST_REQUESTS) -> None:
        self._most = most_requests
        self._courses: OrderedDict[str, list[Timed]] = OrderedDict()

    def stepped(self, item: StepItemResult, latency_ms: float) -> list[Timed] | None:
        """A step was reported: all steps of the request if it has ended with none missing."""
        if item.outcome not in ("committed", "duplicate"):
            return None
        course = self._courses.setdefault(item.request_id, [])
        self._courses.move_to_end(item.request_id)
        if item.step == len(course) + 1:
            course.append((item, latency_ms))
        if len(self._courses) > self._most:
            self._courses.popitem(last=False)
        if item.finish_reason is None:
            return None
        del self._courses[item.request_id]
        return course if len(course) == item.step else None


class BoundedFolder:
    """Recorded steps in files that together stay below `max_bytes`. Blocks while it writes."""

    def __init__(self, folder: Path, max_bytes: int, *, name: Callable[[], str]) -> None:
        """`name`: of the next file; names ascend."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._name = name
        self._writer: StepWriter | None = None

    def write(self, steps: Sequence[RecordedStep]) -> None:
        """Append. Raises RecordingError."""
        if self._writer is None or self._writer.n_bytes >= self._max_bytes // N_FILES:
            self.close()
            self._drop_oldest()
            self._writer = StepWriter(self._folder / f"{self._name()}.jsonl")
        self._writer.write(steps)

    def close(self) -> None:
        """Close the file being written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _drop_oldest(self) -> None:
        files = sorted(self._folder.glob("*.jsonl"))
        sizes = {path: path.stat().st_size for path in files}
        room = self._max_bytes - self._max_bytes // N_FILES
        while files and sum(sizes[path] for path in files) > room:
            files.pop(0).unlink()


class TrafficRecorder:
    """Writes the runs that a collector has completed."""

    def __init__(self, store: Store, folder: BoundedFolder) -> None:
        self._store = store
        self._folder = folder

    async def describe(self, run: Sequence[Timed]) -> list[RecordedStep] | None:
        """The run's steps with what the store knows of its request; None if it knows nothing."""
        request_id = run[0][0].request_id
        try:
            (record,) = await self._store.load([request_id])
        except StoreUnavailableError as error:
            log.warning("request %s is not recorded: %s", request_id, error)
            return None
        return None if record is None else [_recorded(record.request, *step) for step in run]

    def write(self, steps: Sequence[RecordedStep]) -> None:
        """See BoundedFolder.write."""
        self._folder.write(steps)

    def close(self) -> None:
        """Close the file being written."""
        self._folder.close()


def _recorded(request: NewRequest, item: StepItemResult, latency_ms: float) -> RecordedStep:
    return RecordedStep(
        model_id=request.model_id,
        prompt_id=prompt_digest(request.prompt),
        run_id=item.request_id,
        n_output=request.spec.n_output,
        block_length=request.spec.block_length,
        step=item.step,
        kind=item.kind,
        block=item.block,
        n_unmasked=item.n_unmasked,
        n_block_masked=item.n_block_masked,
        threshold=item.threshold,
        confidence=item.confidence,
        latency_ms=latency_ms,
        finish_reason=item.finish_reason,
    )
