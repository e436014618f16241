"""What is known of a request's progress. Committed steps never change, so the furthest reported is
right, whoever reports it and at whatever epoch; only the store may take steps back."""

from __future__ import annotations

from dilaserve.messages import StepItemResult
from dilaserve_scheduler.core.events import StoredRequest
from dilaserve_scheduler.core.model import Request

__all__ = ["advance_by_record", "advance_by_step"]

SMOOTHING = 0.5
"""Weight of the last step in the pace."""


def advance_by_step(now: float, request: Request, step: StepItemResult) -> bool:
    """Take over a committed step; False if it is not news."""
    if step.step <= request.step:
        return False
    request.pace += (SMOOTHING if request.pace else 1.0) * (step.n_new - request.pace)
    request.n_new = step.n_new
    _set(now, request, step.step, step.n_unmasked, step.block, step.n_block_masked)
    return True


def advance_by_record(now: float, request: Request, record: StoredRequest) -> bool:
    """Take over what is stored, even if it is less than was known: a store that was restarted may
    have lost steps. (A record read just before the last result sets memory back for one step,
    which does no harm: credit never shrinks.) False if it is not news."""
    if (record.step, record.n_unmasked) == (request.step, request.n_unmasked):
        return False
    n_steps, n_new = record.step - request.step, record.n_unmasked - request.n_unmasked
    if n_steps > 0:
        request.pace = request.n_new = max(n_new, 0) / n_steps
    _set(now, request, record.step, record.n_unmasked, record.block, record.n_block_masked)
    return True


def _set(
    now: float, request: Request, step: int, n_unmasked: int, block: int, n_block_masked: int
) -> None:
    if not n_block_masked and block + 1 < request.n_blocks:
        block += 1
        n_block_masked = request.block_size(block)
    request.step, request.n_unmasked = step, n_unmasked
    request.block, request.n_block_masked = block, n_block_masked
    request.progress_at, request.n_nudges = now, 0
