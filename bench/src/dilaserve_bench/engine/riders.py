"""A static batch as most serving systems have it: of fixed shape until its slowest request ends.

Rows of requests that have ended ride along in every pass. The engine knows nothing of it.
"""

from __future__ import annotations

from copy import copy

from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.engine.batch import place_of
from dilaserve_gpu_worker.engine.engine import Engine, Plan
from dilaserve_gpu_worker.engine.sequence import Ints, Row, Sequence
from dilaserve_gpu_worker.engine.types import BatchOutput

__all__ = ["Riders"]


class Riders:
    """Runs an engine's passes, and keeps in them who has ended until `clear`.

    A rider computes its last block from its cache, and nothing is made of what comes out. That is
    the least it can cost: no recompute step, no logits, its own length and not the longest one's.
    Its pages are the pool's again, and whoever starts before `clear` may be given them: its keys
    and values would be overwritten, so that such a pass is refused.
    """

    def __init__(self, engine: Engine, cache_mode: CacheMode) -> None:
        self._engine = engine
        self._cache_mode: CacheMode = cache_mode
        self._rows: list[Row] = []

    def step(self) -> BatchOutput | None:
        """One pass with all riders in it; None when nobody else may run. Raises RuntimeError where
        a request has been given pages of a rider."""
        plan = self._engine.plan()
        if plan is None:
            return None
        self._check_pages(plan)
        pages = {row.request_id: (row.sequence.pages, row.sequence.slots) for row in plan.rows}
        rows = sorted([*plan.rows, *self._rows], key=place_of)
        scores = self._engine.forward(Plan(rows, plan.started_s))
        output = self._engine.unmask(plan, scores)
        self._rows += [
            self._rider(row.sequence, *pages[row.request_id])
            for row in plan.rows
            if row.sequence.finish_reason is not None
        ]
        return output

    def clear(self) -> None:
        """The batch has ended."""
        self._rows.clear()

    def _check_pages(self, plan: Plan) -> None:
        """Only who starts has new pages."""
        for row in plan.rows:
            if row.sequence.cached_block is not None:
                continue
            pages = set(row.sequence.pages)
            for rider in self._rows:
                if not pages.isdisjoint(rider.sequence.pages):
                    raise RuntimeError(
                        f"request {row.request_id} starts late, on KV pages of {rider.request_id}, "
                        "which still rides along and would overwrite them; give the engine "
                        "max_batch_tokens with which a whole batch starts in one pass"
                    )

    def _rider(self, sequence: Sequence, pages: list[int], slots: Ints) -> Row:
        """The cache row of its last block, on the pages that it had."""
        rider = copy(sequence)
        rider.pages, rider.slots, rider.cached_block = pages, slots, sequence.block
        return rider.next_row(self._cache_mode)
