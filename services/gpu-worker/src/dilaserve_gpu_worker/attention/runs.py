"""The shape of a ragged batch as an attention backend sees it. Knows no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dilaserve_gpu_worker.transfer import Array

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
class Room:
    """Sizes that kernels are called with. What was captured with some room serves every batch
    with as many rows and queries, and no more of the rest."""

    n_rows: int
    n_queries: int
    """Of all rows."""
    longest_query: int
    longest_key: int
    n_keys: int
    """Of all rows."""


def room_of(ragged: Ragged) -> Room:
    """What a batch needs itself."""
    runs = ragged.runs
    return Room(
        n_rows=sum(run.n_rows for run in runs),
        n_queries=sum(run.n_rows * run.n_queries for run in runs),
        longest_query=max(run.n_queries for run in runs),
        longest_key=max(run.n_keys for run in runs),
        n_keys=sum(run.n_rows * run.n_keys for run in runs),
    )


@dataclass(frozen=True, slots=True)
class PooledKeys:
    """One layer of the KV pool."""

    k_SGA: Tensor
    v_SGA: Tensor


class LayerAttention(Protocol):
    """Attention of one layer of a ragged batch. Shape letters: models.model."""

    def __call__(
        self, q_THA: Tensor, k_TGA: Tensor, v_TGA: Tensor, pooled: PooledKeys | None
    ) -> Tensor:
        """Mix values as THA. The batch's own keys and values are already in the pool, where there
        is one. Tokens outside all runs (padding) come back as zeros."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a batch's shape needs, once for all layers."""

    arrays: list[Array]
    """To be moved to the device."""
    bind: Callable[[Sequence[Tensor]], LayerAttention]
    """Takes them there."""


class Attention(Protocol):
    """An attention backend."""

    def __call__(self, ragged: Ragged, room: Room | None = None) -> Prepared:
        """Prepare for a batch; `room`: sizes to pad to, by default the batch's own."""
        ...
