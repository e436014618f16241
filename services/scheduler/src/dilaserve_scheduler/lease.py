"""The scheduler's lease: wait for it, keep it, and take it again under a higher term.

One scheduler decides at a time. Terms fence a former holder off, so a lease lost without knowing
does no harm; the lease only says who goes on. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging

from dilaserve.errors import DiLaServeError, StoreUnavailableError
from dilaserve.store import Store

__all__ = ["Lease", "LeaseLostError"]

STANDBY_POLL_S = 0.2

log = logging.getLogger(__name__)


class LeaseLostError(DiLaServeError):
    """Another scheduler decides now; this one has to stop and start over."""


class Lease:
    """One holder's lease. `term` is 0 until it is held."""

    def __init__(self, store: Store, *, holder: str, ttl_s: float) -> None:
        self._store = store
        self._holder = holder
        self._ttl_s = ttl_s
        self._changing = asyncio.Lock()
        self.term = 0

    async def take(self) -> int:
        """Wait until nobody else holds it, and return its term."""
        reason = ""
        while True:
            try:
                term = await self._try_take(min_term=0)
                why = "another scheduler holds it"
            except StoreUnavailableError as error:
                term, why = None, str(error)
            if term is not None:
                self.term = term
                return term
            if why != reason:
                log.info("standing by for the lease: %s", why)
            reason = why
            await asyncio.sleep(STANDBY_POLL_S)

    async def keep_once(self) -> bool:
        """Extend it. True if the term has changed: it had run out, but nobody else has it. Raises
        LeaseLostError. An unavailable store changes nothing: nobody can take the lease then."""
        async with self._changing:
            try:
                if await self._store.renew_lease(self._holder, term=self.term, ttl_s=self._ttl_s):
                    return False
            except StoreUnavailableError as error:
                log.warning("the lease was not renewed, trying again: %s", error)
                return False
            log.warning("the lease of term %d has run out; taking it again", self.term)
            return await self._retake(self.term)

    async def raise_above(self, term: int) -> bool:
        """Hold it under a term above `term`; False if that is so already. Raises LeaseLostError."""
        async with self._changing:
            return term >= self.term and await self._retake(term)

    async def release(self) -> None:
        """Let a successor take over at once."""
        if self.term:
            try:
                await self._store.release_lease(self._holder, term=self.term)
            except StoreUnavailableError as error:
                log.warning("the lease was not released, it runs out by itself: %s", error)
        self.term = 0

    @property
    def renew_every_s(self) -> float:
        """Time between two renewals."""
        return self._ttl_s / 3

    async def _retake(self, above: int) -> bool:
        try:
            term = await self._try_take(min_term=above + 1)
        except StoreUnavailableError:
            return False  # the next renewal tries again
        if term is None:
            raise LeaseLostError(
                f"another scheduler has taken the lease after term {self.term}; "
                "this one stops, and stands by when it is started again"
            )
        self.term = term
        return True

    async def _try_take(self, *, min_term: int) -> int | None:
        return await self._store.take_lease(self._holder, ttl_s=self._ttl_s, min_term=min_term)
