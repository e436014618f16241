"""A pass as plain arrays: the flat token axis, where to write and read keys, which logits to make.

Built from rows, run by a Runner; it is all that another rank needs to compute the same pass.
Arrays are numpy's: cheap to build one by one, moved to the device at once by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dilaserve_gpu_worker.engine.sequence import Ints, Row

MIN_ROWS = 32
"""The flat axis and the logit rows are padded to a multiple of this. A product of fewer than 12
rows, and the last elements of a SiLU over an odd count, differ in their last bits from the same
rows in a larger batch (measured with MKL and AVX-512, one and two threads)."""


@dataclass(frozen=True, slots=True)
class RunArrays:
    """Consecutive rows of one shape; see attention.Run."""

    n_rows: int
    n_queries: int
    n_keys: int
    start: int
    key_slots: Ints | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. T tokens, N logit rows, both padded."""

    tokens_T: Ints
    positions_T: Ints
    n_tokens: int
    """Tokens before padding."""
    write_slots: Ints | None
    """Pool slot of each token before padding; None without a pool."""
    runs: list[RunArrays]
    logit_rows_N: Ints
    """Flat indices whose logits are wanted, row by row."""
    n_logits: int
    """Logit rows before padding."""


def build_batch(rows: Sequence[Row]) -> Batch:
    """Lay `rows` (sorted by shape, see `shape_of`) on one flat axis."""
    lengths = np.array([len(row.tokens) for row in rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
    wanted = [
        first + row.sequence.n_prompt + row.candidates - row.start
        for first, row in zip(starts, rows, strict=False)
    ]
    logit_rows = np.concatenate(wanted)
    return Batch(
        tokens_T=_pad(np.concatenate([row.tokens for row in rows])),
        positions_T=_pad(np.concatenate(positions)),
        n_tokens=int(starts[-1]),
        write_slots=_write_slots(rows),
        runs=_runs(rows),
        logit_rows_N=_pad(logit_rows) if len(logit_rows) else logit_rows,
        n_logits=len(logit_rows),
    )


def shape_of(row: Row) -> tuple[int, int]:
    """Numbers of queries and keys; rows of one shape that stand together are one run."""
    return len(row.tokens), row.n_keys


def _pad(values: Ints) -> Ints:
    """Zeros up to a multiple of MIN_ROWS: token 0 at position 0, which nothing attends to."""
    return np.pad(values, (0, -len(values) % MIN_ROWS))


def _write_slots(rows: Sequence[Row]) -> Ints | None:
    slots = [
        row.sequence.slots[row.start : row.start + len(row.tokens)]
        for row in rows
        if row.sequence.slots is not None
    ]
    return np.concatenate(slots) if slots else None


def _runs(rows: Sequence[Row]) -> list[RunArrays]:
    runs, start = [], 0
    for (n_queries, n_keys), group in groupby(rows, key=shape_of):
        members = list(group)
        slots = [row.sequence.slots for row in members if row.sequence.slots is not None]
        # A row that computes all its tokens has its keys at hand.
        key_slots = np.concatenate(slots) if slots and n_queries < n_keys else None
        runs.append(RunArrays(len(members), n_queries, n_keys, start, key_slots))
        start += len(members) * n_queries
    return runs
