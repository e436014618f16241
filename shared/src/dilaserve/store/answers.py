"""What a store in memory answers, from the record that it keeps. Knows no rules of fencing."""

from __future__ import annotations

from typing import Any, Protocol

from dilaserve.lifecycle import State
from dilaserve.messages import ConfidenceStats, FinishReason
from dilaserve.store.records import AdmitAnswer, NewRequest, ReassignAnswer, RequestRecord

__all__ = ["KeptRecord", "admit_answer", "reassign_answer", "to_record"]


class KeptRecord(Protocol):
    """A request as a store in memory keeps it; the fields of RequestRecord, to be changed."""

    request: NewRequest
    canvas: list[int]
    state: State
    epoch: int
    term: int
    owner: str
    attempts: int
    step: int
    stats: ConfidenceStats | None
    finish_reason: FinishReason | None
    error: str
    ended_s: float | None
    weights_hash: str


def admit_answer(outcome: Any, record: KeptRecord | None) -> AdmitAnswer:
    """The answer to `admit`, with what is stored after it."""
    if record is None:
        return AdmitAnswer(outcome=outcome)
    return AdmitAnswer(outcome=outcome, epoch=record.epoch, step=record.step, owner=record.owner)


def reassign_answer(outcome: Any, record: KeptRecord | None) -> ReassignAnswer:
    """The answer to `reassign`, with what is stored after it."""
    if record is None:
        return ReassignAnswer(outcome=outcome)
    return ReassignAnswer(
        outcome=outcome,
        epoch=record.epoch,
        step=record.step,
        owner=record.owner,
        attempts=record.attempts,
    )


def to_record(record: KeptRecord) -> RequestRecord:
    """What `load` answers: a copy that does not change with the record."""
    return RequestRecord(
        request=record.request,
        state=record.state,
        epoch=record.epoch,
        term=record.term,
        owner=record.owner,
        attempts=record.attempts,
        step=record.step,
        canvas=list(record.canvas),
        stats=record.stats,
        finish_reason=record.finish_reason,
        error=record.error,
        ended_s=record.ended_s,
        weights_hash=record.weights_hash,
    )
