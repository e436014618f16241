"""The store: the truth about every request, as a port with two adapters.

`MemoryStore` and `RedisStore` (Redis or Valkey, by server-side functions) pass the same contract
and property tests (tests/contract). Every change of a request is atomic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dilaserve.store.records import (
    AdmitAnswer,
    CancelAnswer,
    Commit,
    CommitOutcome,
    Delta,
    FailAnswer,
    NewRequest,
    ReassignAnswer,
    RequestRecord,
    StoreMemory,
)

__all__ = ["Store"]


class Store(Protocol):
    """Atomic operations on request records, and the scheduler's lease.

    Every method raises StoreUnavailableError when the server does not answer; a write may then
    have happened, and doing it again does no harm.
    """

    # --- gateway -------------------------------------------------------------------------------

    async def new(self, request: NewRequest, *, expire_s: float = 30.0) -> bool:
        """Write a record in state `new`, gone after `expire_s` unless admitted.
        False when the id exists (nothing is changed)."""
        ...

    async def cancel(self, request_id: str, *, reason: str) -> CancelAnswer:
        """Mark `cancelled` (works without a scheduler); the next commit answers `terminal`."""
        ...

    # --- scheduler: each carries its term, a lower one than the stored answers `stale_term` ------

    async def admit(
        self, request_id: str, *, term: int, owner: str, min_epoch: int = 1
    ) -> AdmitAnswer:
        """`new` → `active` with epoch `min_epoch` and the owner ("" = parked). Repeated:
        `already`. An epoch above 1 is for a request that had been admitted before and whose
        admission the store lost: no epoch is ever given to two owners."""
        ...

    async def reassign(
        self,
        request_id: str,
        *,
        term: int,
        owner: str,
        expected_epoch: int,
        min_epoch: int = 0,
        owner_died: bool = False,
    ) -> ReassignAnswer:
        """Raise the epoch to max(stored, min_epoch - 1) + 1 and set the owner ("" = parked).
        `owner_died` adds one to the attempts. Answers `conflict`, changing nothing, when the
        stored epoch is not `expected_epoch` (a repeat after a lost answer sees its own epoch and
        owner in the answer); the new epoch, step and status otherwise."""
        ...

    async def fail(self, request_id: str, *, term: int, error: str) -> FailAnswer:
        """Mark `failed` with a message for the client (poison, refused for good)."""
        ...

    async def take_lease(self, holder: str, *, ttl_s: float, min_term: int = 0) -> int | None:
        """Take the scheduler's lease when it is free, expired or the holder's own, and return the
        term: one above every stored term before, and at least `min_term` (one above the highest
        term that heartbeats tell of, in case the store lost some). From then on every write with
        a lower term answers `stale_term`. None when another holds it."""
        ...

    async def renew_lease(self, holder: str, *, term: int, ttl_s: float) -> bool:
        """Extend the lease. False when it is no longer ours: stop deciding at once."""
        ...

    async def release_lease(self, holder: str, *, term: int) -> None:
        """Give the lease up, so that a successor need not wait."""
        ...

    async def active(self) -> list[str]:
        """Ids of all active requests."""
        ...

    # --- worker --------------------------------------------------------------------------------

    async def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """One round trip for a batch, one answer per item, each atomic. In this order:
        record missing, cancelled or failed → `terminal`; other epoch → `fenced`;
        step already stored → `duplicate`; done → `terminal`; other weights than those of the steps
        before → `fenced`; step above stored + 1 without the whole canvas → `gap`; a position that
        is committed already, or a canvas that masks or changes one → `fenced` (committed tokens
        never change: the worker is out of step with the store and has to load the request again);
        else `committed`: positions, step, statistics and one stream entry with id `<step>-1`, and
        state `done` when `finish_reason` is set.
        Raises ValueError for a malformed item, before anything is written, and for a position
        outside the canvas, after the rest of the batch is written."""
        ...

    # --- readers -------------------------------------------------------------------------------

    async def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """Records in the order asked; None for one that does not exist."""
        ...

    async def deltas(self, request_id: str, *, after_step: int = 0) -> list[Delta]:
        """The stream entries of all steps above `after_step`, in order."""
        ...

    async def run_id(self) -> str:
        """Changes when the server was restarted and may have lost its last second of writes."""
        ...

    async def memory(self) -> StoreMemory:
        """Memory used and allowed; a full store stops every commit, so admission looks at it."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
