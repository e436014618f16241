"""Passes made of cache steps alone, padded to a few shapes: what the device does for a shape is
captured once and replayed for every pass of it. Knows no request, and not how a device captures.

A pass over few tokens keeps the device less busy than the processor that tells it each kernel;
a replay is told at once. Passes with other steps compute more, and are never captured.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from dilaserve_gpu_worker.attention import Room, Run
from dilaserve_gpu_worker.engine.batch import MIN_ROWS, Batch
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.sequence import Ints
from dilaserve_gpu_worker.transfer import Array, StaticArrays

__all__ = ["Capture", "Captured", "GraphOptions", "GraphShapes", "StepGraphs", "padded"]

log = logging.getLogger(__name__)

_FEW_ROWS = (1, 2, 4, 8)
_ROW_STEP = 8
_FEWEST_KEYS = 256

Compute = Callable[[], Tensor]


class Captured(Protocol):
    """What a device does for one shape."""

    output: Tensor
    """Where each replay leaves its result."""

    def replay(self) -> None:
        """Do it again, on what now lies where it lay."""
        ...


class Capture(Protocol):
    """How a device captures."""

    def has_room(self) -> bool:
        """Whether its memory has room for one more."""
        ...

    def __call__(self, compute: Compute) -> Captured:
        """Capture what `compute` has the device do; it has run before. Raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which passes to capture, and how."""

    capture: Capture
    block_length: int
    """Most queries of a row."""
    max_rows: int = 64
    max_graphs: int = 48
    """Kept; of more, the least recently used goes."""
    min_uses: int = 2
    """Passes of a shape before it is captured: capturing takes as long as many passes."""


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The shapes that passes are padded to."""

    block_length: int
    max_rows: int
    longest_key: int
    counts_keys: bool
    """Whether the attention backend wants all keys one behind the other, so that their number is
    part of the shape. Else it finds them by tables, which are as wide as `longest_key` needs."""

    def room_for(self, batch: Batch) -> Room | None:
        """The smallest shape that a pass fits in; None if it is not made of cache steps alone, or
        is too large."""
        runs = batch.runs
        if any(run.first_key is None or run.n_queries > self.block_length for run in runs):
            return None
        n_rows = sum(run.n_rows for run in runs)
        if n_rows > self.max_rows or len(batch.outlook_rows_K):
            return None
        bucket = row_bucket(n_rows)
        n_keys = bucket * self.longest_key
        if self.counts_keys:
            n_scratch = (bucket - n_rows) * self.n_scratch_keys
            n_keys = key_bucket(sum(run.n_rows * run.n_keys for run in runs) + n_scratch)
        return Room(bucket, bucket * self.block_length, self.block_length, self.longest_key, n_keys)

    @property
    def n_scratch_keys(self) -> int:
        """Of a row that pads a batch."""
        return min(self.block_length, PAGE_TOKENS)


def row_bucket(n_rows: int) -> int:
    """1, 2, 4, 8, 16, 24, 32, …: the smallest that is not less."""
    return next((few for few in _FEW_ROWS if few >= n_rows), -(-n_rows // _ROW_STEP) * _ROW_STEP)


def key_bucket(n_keys: int) -> int:
    """Four sizes an octave, so that at most a fifth of what is gathered is padding."""
    step = 1 << max(n_keys - 1, _FEWEST_KEYS).bit_length() - 3
    return max(-(-n_keys // step) * step, _FEWEST_KEYS)


def padded(batch: Batch, room: Room, scratch_page: int) -> Batch:
    """The same pass in the shape of `room`: each row has `longest_query` queries, those it lacks
    being token 0 at position 0; rows that are lacking see, and are written to, the scratch page.
    What is computed for the padding goes nowhere else."""
    width = room.longest_query
    n_rows = sum(run.n_rows for run in batch.runs)
    index_T = _new_indices(batch.runs, width)
    scratch = scratch_page * PAGE_TOKENS + np.arange(width) % PAGE_TOKENS
    write_slots = np.tile(scratch, room.n_rows)
    write_slots[index_T] = batch.write_slots
    n_lacking = room.n_rows - n_rows
    scratch_keys = scratch[:PAGE_TOKENS]
    n_flat = -(-room.n_queries // MIN_ROWS) * MIN_ROWS
    return Batch(
        tokens_T=_spread(batch.tokens_T[: batch.n_tokens], index_T, n_flat),
        positions_T=_spread(batch.positions_T[: batch.n_tokens], index_T, n_flat),
        n_tokens=room.n_queries,
        write_slots=write_slots,
        key_slots=np.concatenate([batch.key_slots, np.tile(scratch_keys, n_lacking)]),
        runs=_padded_runs(batch, width, n_lacking, len(scratch_keys)),
        logit_rows_M=_spread(
            index_T[batch.logit_rows_M], np.arange(len(batch.logit_rows_M)), n_flat
        ),
        outlook_rows_K=batch.outlook_rows_K,
    )


def _new_indices(runs: Sequence[Run], width: int) -> Ints:
    """Where each token comes to lie on the padded axis."""
    parts, row = [], 0
    for run in runs:
        first_of_row = (row + np.arange(run.n_rows)) * width
        parts.append((first_of_row[:, None] + np.arange(run.n_queries)).reshape(-1))
        row += run.n_rows
    return np.concatenate(parts)


def _spread(values: Ints, index: Ints, n: int) -> Ints:
    spread = np.zeros(n, np.int64)
    spread[index] = values
    return spread


def _padded_runs(batch: Batch, width: int, n_lacking: int, n_scratch_keys: int) -> list[Run]:
    runs, start = [], 0
    for run in batch.runs:
        runs.append(Run(run.n_rows, width, run.n_keys, start, run.first_key))
        start += run.n_rows * width
    if n_lacking:
        runs.append(Run(n_lacking, width, n_scratch_keys, start, len(batch.key_slots)))
    return runs


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: StaticArrays
    captured: Captured


class StepGraphs:
    """What was captured, by shape; captured when a shape turns out to be used."""

    def __init__(self, options: GraphOptions) -> None:
        self._options = options
        self._uses: Counter[Room] = Counter()
        self._graphs: OrderedDict[Room, _Graph] = OrderedDict()
        self._is_failed = False
        self.n_replays = 0

    def __len__(self) -> int:
        """Graphs kept."""
        return len(self._graphs)

    def wants(self, room: Room) -> bool:
        """Whether a pass of this shape is to be `run`: it is captured, or ought to be now."""
        if room in self._graphs:
            return True
        self._uses[room] += 1
        if self._is_failed or self._uses[room] < self._options.min_uses:
            return False
        return self._options.capture.has_room()

    def run(
        self,
        room: Room,
        arrays: Sequence[Array],
        compute: Callable[[Sequence[Tensor]], Tensor],
        inputs: Callable[[Sequence[Array]], StaticArrays],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The result of `compute` on `arrays`, and those on the device; both hold until the next
        pass. `inputs` gives them a place there. Computes exactly once, whether it captures or
        replays, so that ranks need not agree about it."""
        graph = self._graphs.get(room)
        if graph is None:
            static = inputs(arrays)
            output = compute(static.tensors)
            self._capture(room, static, compute)
            return output, static.tensors
        self._graphs.move_to_end(room)
        graph.inputs.fill(arrays)
        graph.captured.replay()
        self.n_replays += 1
        return graph.captured.output, graph.inputs.tensors

    def _capture(
        self, room: Room, static: StaticArrays, compute: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        while len(self._graphs) >= self._options.max_graphs:
            self._graphs.popitem(last=False)
        try:
            captured = self._options.capture(lambda: compute(static.tensors))
        except RuntimeError as error:  # all that torch raises of CUDA, lack of memory included
            self._is_failed = True
            log.warning("no more passes are captured, others run one by one: %s", error)
        else:
            self._graphs[room] = _Graph(static, captured)
