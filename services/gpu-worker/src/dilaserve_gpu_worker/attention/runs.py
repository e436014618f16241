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
    key_slots: Tensor | None
    """Pool slots of all its keys, row by row; None where a row's keys are its own tokens."""

    @property
    def stop(self) -> int:
        """Flat index behind the last query."""
        return self.start + self.n_rows * self.n_queries
