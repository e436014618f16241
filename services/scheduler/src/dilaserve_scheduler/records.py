"""From a stored record to what the core needs of it. Knows no store."""

from __future__ import annotations

from dilaserve.store.records import MASKED, RequestRecord
from dilaserve_scheduler.core.events import StoredRequest

__all__ = ["to_stored"]


def to_stored(record: RequestRecord, *, offset_s: float) -> StoredRequest:
    """The record in short. `offset_s` is what the core's clock is ahead of the wall clock."""
    request, canvas = record.request, record.canvas
    length = request.spec.block_length
    n_masked = canvas.count(MASKED)
    first = canvas.index(MASKED) if n_masked else len(canvas) - 1
    block = first // length
    return StoredRequest(
        request_id=request.request_id,
        model_id=request.model_id,
        n_prompt=len(request.prompt),
        n_output=request.spec.n_output,
        block_length=length,
        arrival_s=request.arrival_s + offset_s,
        state=record.state,
        epoch=record.epoch,
        owner=record.owner,
        attempts=record.attempts,
        step=record.step,
        n_unmasked=len(canvas) - n_masked,
        block=block,
        n_block_masked=canvas[block * length : (block + 1) * length].count(MASKED),
        slo_ms=request.level.slo_ms,
        priority=request.level.priority,
        min_confidence=request.level.min_confidence,
        weights_hash=record.weights_hash,
    )
