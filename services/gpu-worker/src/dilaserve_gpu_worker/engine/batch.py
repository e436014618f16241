"""A pass as plain arrays: the flat token axis, where to write and read keys, which logits to make.

Built from rows, run by a Runner; it is all that another rank needs to compute the same pass.
Arrays are numpy's: cheap to build one by one, moved to the device at once by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from dilaserve_gpu_worker.attention import Run
from dilaserve_gpu_worker.engine.sequence import Ints, Row

MIN_ROWS = 32
"""The flat axis and the logit rows are padded to a multiple of this. A product of fewer than 12
rows, and the last elements of a SiLU over an odd count, differ in their last bits from the same
rows in a larger batch (measured with MKL and AVX-512, one and two threads)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. T tokens and M logit rows, both padded."""

    tokens_T: Ints
    positions_T: Ints
    n_tokens: int
    """Tokens before padding."""
    write_slots: Ints
    """Pool slot of each token before padding; empty without a pool."""
    key_slots: Ints
    """Pool slots of the keys of the runs that read the pool; see attention.Ragged."""
    runs: list[Run]
    logit_rows_M: Ints
    """Flat indices whose logits are wanted, row by row, then padding."""
    outlook_rows_K: Ints
    """Flat indices of which only the confidence is wanted, row by row, then padding."""


def build_batch(rows: Sequence[Row], shift: int) -> Batch:
    """Lay `rows` (sorted, see `place_of`) on one flat axis. `shift`: the model's
    ModelConfig.logit_shift."""
    spans = [slice(row.start, row.start + row.n_tokens) for row in rows]
    *firsts, n_tokens = accumulate([row.n_tokens for row in rows], initial=0)
    placed = list(zip(rows, firsts, strict=True))
    return Batch(
        tokens_T=_padded([row.tokens for row in rows]),
        positions_T=_padded([np.arange(span.start, span.stop) for span in spans]),
        n_tokens=n_tokens,
        write_slots=_joined([row.slots[span] for row, span in zip(rows, spans, strict=True)]),
        key_slots=_joined([row.slots for row in rows if not row.is_full]),
        runs=_runs(rows),
        logit_rows_M=_padded([_predictors(row, row.candidates, at, shift) for row, at in placed]),
        outlook_rows_K=_padded(
            [_predictors(row, row.outlook, at, shift) for row, at in placed if len(row.outlook)]
        ),
    )


def place_of(row: Row) -> tuple[int, int, list[int]]:
    """By which the rows of a pass are sorted: by shape, and then as their keys lie in the pool, so
    that attention may read those of neighbours in one piece."""
    return *_shape_of(row), row.sequence.pages[:1]


def _shape_of(row: Row) -> tuple[int, int]:
    """Numbers of queries and keys; rows of one shape that stand together are one run."""
    return len(row.tokens), row.sequence.n_tokens


def _predictors(row: Row, positions: Ints, first: int, shift: int) -> Ints:
    """Flat indices of the hidden states that predict canvas positions of a row whose tokens begin
    at `first`; never one of another row."""
    predictors: Ints = positions + (first + row.sequence.n_prompt - row.start - shift)
    return np.maximum(predictors, first) if shift else predictors


def _padded(parts: Sequence[Ints]) -> Ints:
    """Joined, and zeros up to a multiple of MIN_ROWS: token 0 at position 0, which nothing attends
    to. Nothing stays nothing."""
    n = sum(map(len, parts))
    return np.concatenate([*parts, np.zeros(-n % MIN_ROWS, np.int64)])


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _runs(rows: Sequence[Row]) -> list[Run]:
    runs, start, first_key = [], 0, 0
    for (n_queries, n_keys), group in groupby(rows, key=_shape_of):
        n_rows = len(list(group))
        is_full = n_queries == n_keys
        runs.append(Run(n_rows, n_queries, n_keys, start, None if is_full else first_key))
        start += n_rows * n_queries
        first_key += 0 if is_full else n_rows * n_keys
    return runs
