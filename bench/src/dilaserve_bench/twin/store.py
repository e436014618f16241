"""The store of the virtual cluster: the fencing rules of `dilaserve.store`, called without waiting.

Answers as `MemoryStore` does (a test holds them to each other), but keeps no stream of deltas and
forgets the canvas of a request that has ended. It never loses a write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dilaserve.lifecycle import Event, State, advance, is_terminal
from dilaserve.messages import CommitOutcome, ConfidenceStats, FinishReason
from dilaserve.store.answers import admit_answer, reassign_answer, to_record
from dilaserve.store.records import (
    MASKED,
    AdmitAnswer,
    FailAnswer,
    NewRequest,
    ReassignAnswer,
    RequestRecord,
)
from dilaserve_gpu_worker.engine.types import StepOutput

__all__ = ["EndedRecord", "TwinStore"]


@dataclass(slots=True)
class _Record:
    request: NewRequest
    canvas: list[int]
    confidences: list[float | None]
    """By position; None where masked."""
    state: State = "new"
    epoch: int = 0
    term: int = 0
    owner: str = ""
    attempts: int = 0
    step: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    stats: ConfidenceStats | None = None
    ended_s: float | None = None
    weights_hash: str = ""
    """Never set, like the two before it: nobody in the twin asks."""


@dataclass(frozen=True, slots=True)
class EndedRecord:
    """A request as it was when it ended."""

    request_id: str
    state: State
    canvas: list[int]


class TwinStore:
    """See dilaserve.store.Store for what each call means. `ended` is told of every end, once."""

    def __init__(self, ended: Callable[[EndedRecord], None]) -> None:
        self._records: dict[str, _Record] = {}
        self._active: dict[str, None] = {}
        self._term = 0
        self._ended = ended

    # --- gateway -------------------------------------------------------------------------------

    def new(self, request: NewRequest) -> bool:
        """See Store.new; records do not expire."""
        if request.request_id in self._records:
            return False
        n_output = request.spec.n_output
        record = _Record(request, [MASKED] * n_output, [None] * n_output)
        self._records[request.request_id] = record
        return True

    # --- scheduler -----------------------------------------------------------------------------

    def take_lease(self, min_term: int = 0) -> int:
        """A term above all before; there is but one scheduler at a time."""
        self._term = max(self._term + 1, min_term)
        return self._term

    def admit(self, request_id: str, *, term: int, owner: str) -> AdmitAnswer:
        """See Store.admit."""
        record = self._records.get(request_id)
        if term < self._term:
            return admit_answer("stale_term", record)
        if record is None:
            return admit_answer("missing", None)
        if record.state != "new":
            return admit_answer("terminal" if is_terminal(record.state) else "already", record)
        record.state = advance(record.state, "admit")
        record.epoch, record.term, record.owner = 1, term, owner
        self._active[request_id] = None
        return admit_answer("admitted", record)

    def reassign(
        self,
        request_id: str,
        *,
        term: int,
        owner: str,
        expected_epoch: int,
        min_epoch: int = 0,
        owner_died: bool = False,
    ) -> ReassignAnswer:
        """See Store.reassign."""
        record = self._records.get(request_id)
        if term < self._term:
            return reassign_answer("stale_term", record)
        if record is None:
            return reassign_answer("missing", None)
        if is_terminal(record.state):
            return reassign_answer("terminal", record)
        if record.state == "new" or record.epoch != expected_epoch:
            return reassign_answer("conflict", record)
        record.epoch = max(record.epoch, min_epoch - 1) + 1
        record.term, record.owner = term, owner
        record.attempts += owner_died
        return reassign_answer("reassigned", record)

    def fail(self, request_id: str, *, term: int, error: str) -> FailAnswer:
        """See Store.fail."""
        record = self._records.get(request_id)
        if term < self._term:
            return FailAnswer(outcome="stale_term")
        if record is None:
            return FailAnswer(outcome="missing")
        if is_terminal(record.state):
            return FailAnswer(outcome="terminal")
        record.term, record.error = term, error
        self._end(record, "fail")
        return FailAnswer(outcome="failed")

    def active(self) -> list[str]:
        """See Store.active; in order of admission."""
        return list(self._active)

    # --- worker --------------------------------------------------------------------------------

    def commit(self, epoch: int, step: StepOutput) -> CommitOutcome:
        """See Store.commit; one step, never with the whole canvas."""
        record = self._records.get(step.request_id)
        if record is None or record.state == "failed":
            return "terminal"
        if record.epoch != epoch:
            return "fenced"
        if step.step <= record.step:
            return "duplicate"
        if record.state == "done":
            return "terminal"
        if step.step > record.step + 1:
            return "gap"
        if not _write(record, step):
            return "fenced"
        record.step = step.step
        if step.finish_reason is not None:
            record.finish_reason = step.finish_reason
            self._end(record, "finish")
        return "committed"

    # --- readers -------------------------------------------------------------------------------

    def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """See Store.load; the canvas of a request that has ended is empty."""
        records = [self._records.get(request_id) for request_id in request_ids]
        return [to_record(record) if record else None for record in records]

    def confidences(self, request_id: str) -> dict[int, float]:
        """With which the tokens of a request that is active were committed, by position; the
        other store has them in its stream."""
        record = self._records.get(request_id)
        known = enumerate(record.confidences) if record is not None else ()
        return {position: each for position, each in known if each is not None}

    def _end(self, record: _Record, event: Event) -> None:
        record.state = advance(record.state, event)
        request_id = record.request.request_id
        self._active.pop(request_id, None)
        canvas, record.canvas, record.confidences = record.canvas, [], []
        self._ended(EndedRecord(request_id, record.state, canvas))


def _write(record: _Record, step: StepOutput) -> bool:
    """The tokens of a step, unless one of its positions is not masked."""
    canvas, confidences, positions = record.canvas, record.confidences, step.positions
    n_new = len(positions)
    if n_new and positions[-1] - positions[0] == n_new - 1:  # side by side, as recorded ones are
        new = slice(positions[0], positions[0] + n_new)
        if canvas[new].count(MASKED) < n_new:
            return False
        canvas[new], confidences[new] = step.tokens, step.confidences
        return True
    if any(canvas[position] != MASKED for position in positions):
        return False
    for position, token, confidence in zip(positions, step.tokens, step.confidences, strict=True):
        canvas[position], confidences[position] = token, confidence
    return True
