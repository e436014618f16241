"""The shape of a ragged batch as an attention backend sees it. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a batch that have the same numbers of queries and keys."""

    n_rows: int
    n_queries: int
    n_keys: int
    start: int
    """Flat index of the first query."""
    first_key: int | None
    """Where its keys begin among the batch's key slots; None: a row's keys are its own tokens."""

    @property
    def stop(self) -> int:
        """Flat index behind the last query."""
        return self.start + self.n_rows * self.n_queries


@dataclass(frozen=True, slots=True)
class PooledKeys:
    """One layer of the KV pool, and which slots of it a batch reads."""

    k_SGA: Tensor
    v_SGA: Tensor
    key_slots: Tensor
    """Slots of all keys of all runs that have a `first_key`, run by run, row by row."""
