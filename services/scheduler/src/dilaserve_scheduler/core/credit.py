"""How far a worker may go by itself with a request (DESIGN section 3, credit).

All functions work on a Request alone; who sends it what is the outbox's.
"""

from __future__ import annotations

from dilaserve.messages import StepItem
from dilaserve_scheduler.core.model import Request

__all__ = ["extend", "grant", "is_ending", "item", "ran_out", "unlock"]

STEPS_AHEAD = 2
"""A block with so many steps left, or fewer, is about to end. One step is being computed while
its predecessor's result is on its way, the other is reserve."""


def grant(request: Request, run_ahead: int | None) -> None:
    """The first credit at a new owner: the present block, and whatever `extend` adds."""
    request.until_block = request.block
    request.until_step = None
    extend(request, run_ahead)


def extend(request: Request, run_ahead: int | None) -> bool:
    """Give what the request's progress calls for, and say whether that is more than it had: to the
    end of the present block, one more when that is about to end and the policy, asked, does not
    want the request elsewhere, and with `run_ahead` at most so many steps. Never shrinks."""
    is_more = False
    if not request.is_leaving:
        ahead = 1 if request.asked_block == request.block and is_ending(request) else 0
        until_block = min(request.block + ahead, request.n_blocks - 1)
        if until_block > request.until_block:
            request.until_block, is_more = until_block, True
    if run_ahead is not None:
        until_step = request.step + run_ahead
        if request.until_step is None or until_step > request.until_step:
            request.until_step, is_more = until_step, True
    return is_more


def unlock(request: Request, held_step: int, run_ahead: int | None) -> None:
    """Its owner holds steps that the store has lost, so that credit reckoned from the store may
    not let it run: allow one more step, with which it writes its whole canvas."""
    request.until_block = min(request.until_block + 1, request.n_blocks - 1)
    if run_ahead is not None:
        request.until_step = max(request.until_step or 0, held_step + run_ahead)


def is_ending(request: Request) -> bool:
    """Whether the present block has two steps or fewer left, by its recent progress."""
    n_masked = request.n_block_masked
    return n_masked <= STEPS_AHEAD * request.pace or n_masked <= STEPS_AHEAD * request.n_new


def ran_out(request: Request) -> bool:
    """Whether the credited blocks are done, so that its owner has stopped."""
    return request.block > request.until_block


def item(request: Request) -> StepItem:
    """The request's credit as it goes on the wire."""
    return StepItem(
        request_id=request.request_id,
        epoch=request.epoch,
        threshold=request.threshold,
        until_block=request.until_block,
        until_step=request.until_step,
    )
