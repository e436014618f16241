"""The shape of a ragged batch as an attention backend sees it. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]


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
class Ragged:
    """What one pass's attention looks like, the same in all layers."""

    runs: Sequence[Run]
    write_slots: Ints
    """Pool slot of each token before padding; empty without a pool."""
    key_slots: Ints
    """Slots of all keys of all runs that have a `first_key`, run by run, row by row."""

    def slots_of(self, run: Run, row: int) -> Ints:
        """Pool slots of the keys of one row of a run."""
        if run.first_key is None:
            first = run.start + row * run.n_queries
            return self.write_slots[first : first + run.n_keys]
        first = run.first_key + row * run.n_keys
        return self.key_slots[first : first + run.n_keys]


@dataclass(frozen=True, slots=True)
class PooledKeys:
    """One layer of the KV pool."""

    k_SGA: Tensor
    v_SGA: Tensor
