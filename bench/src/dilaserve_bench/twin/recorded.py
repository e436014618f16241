"""Steps as they were recorded: how many a request needs at each fixed threshold, and no more.

A step at threshold γ advances a request by 1/S(γ) of its output, where S(γ) is the recorded count:
who keeps a threshold takes exactly S(γ) steps, who changes it takes a mixture. A step belongs to
one block; what it advances beyond the block's end counts for the next. There are no tokens and no
confidences: all are 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import ConfidenceStats, FinishReason
from dilaserve.store.records import MASKED
from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import EngineRequest, StepOutput

__all__ = ["NOT_RECORDED", "RecordedCourse", "RecordedSource", "StepTable", "load_steps"]

NOT_RECORDED = ConfidenceStats(min=0.0, q25=0.0, median=0.0, mean=0.0, q75=0.0)
"""Stands in place of the statistics that a recording of step counts does not have."""

_EPSILON = 1e-6
"""Tokens; far above the rounding of a sum of strides, far below any stride."""


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """Denoising steps of whole requests: a row per request, a column per threshold (ascending)."""

    model: str
    what: str
    source: str
    licence: str
    n_output: int
    """Output length of the recorded requests."""
    block_length: int
    thresholds: list[float]
    rows: list[list[int]]

    def steps(self, row: int, threshold: float, n_output: int, n_blocks: int) -> int:
        """Steps of a request with the habits of `row`, in proportion to its output. Between two
        recorded thresholds linear, beyond them as at the nearest; at least one a block and at
        most one a token."""
        recorded = _interpolate(self.thresholds, self.rows[row], threshold)
        return min(max(round(recorded * n_output / self.n_output), n_blocks), n_output)


def load_steps(path: Path) -> StepTable:
    """Read a table. Raises DiLaServeError, naming the file."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=StepTable)
    except OSError as error:
        raise DiLaServeError(
            f"step counts {path} cannot be read: {error.strerror}; give another file"
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DiLaServeError(
            f"step counts {path} are malformed: {error}; give one JSON table of counts by request "
            "and threshold, like gsm8k_llada_steps.json in dilaserve_bench"
        ) from error
    wrong = _wrong(table)
    if wrong is not None:
        raise DiLaServeError(f"step counts {path}: {wrong}; mend the file")
    return table


def _wrong(table: StepTable) -> str | None:
    if not table.rows or any(len(row) != len(table.thresholds) for row in table.rows):
        return "every row needs a count for each threshold"
    if not table.thresholds or table.thresholds != sorted(set(table.thresholds)):
        return "thresholds have to ascend, and be some"
    if min(table.n_output, table.block_length, *map(min, table.rows)) < 1:
        return "lengths and counts have to be at least 1"
    return None


class RecordedSource:
    """See StepSource. `row_of` tells the row of a request by its id."""

    def __init__(self, table: StepTable, row_of: Callable[[str], int]) -> None:
        self._table = table
        self._row_of = row_of
        self.committed: dict[str, float] = {}
        """Tokens, with their fraction, by request that is under way."""
        self._strides: dict[tuple[int, int, int], dict[float, float]] = {}

    def begin(self, request: EngineRequest) -> RecordedCourse:
        """See StepSource."""
        advanced = self.committed[request.request_id] if request.step else 0.0
        return RecordedCourse(self, request, advanced)

    def strides(self, request: EngineRequest) -> dict[float, float]:
        """Tokens a step, by threshold, as far as asked before: one for all that are alike."""
        row, spec = self._row_of(request.request_id), request.spec
        return self._strides.setdefault((row, spec.n_output, spec.block_length), {})

    def stride(self, request: EngineRequest, threshold: float) -> float:
        """Tokens that a step at `threshold` advances."""
        row, spec = self._row_of(request.request_id), request.spec
        n_blocks = -(-spec.n_output // spec.block_length)
        return spec.n_output / self._table.steps(row, threshold, spec.n_output, n_blocks)


class RecordedCourse:
    """See Course. `_advanced` is in tokens, with its fraction."""

    __slots__ = (
        "_advanced",
        "_block",
        "_block_end",
        "_block_length",
        "_finish_reason",
        "_kind",
        "_n_output",
        "_n_unmasked",
        "_request",
        "_request_id",
        "_source",
        "_step",
        "_strides",
        "_threshold",
    )

    def __init__(self, source: RecordedSource, request: EngineRequest, advanced: float) -> None:
        self._source = source
        self._request = request
        self._request_id = request.request_id
        self._n_output, self._block_length = len(request.canvas), request.spec.block_length
        self._strides = source.strides(request)
        self._advanced = advanced
        self._step = request.step
        self._n_unmasked = self._n_output - request.canvas.count(MASKED)
        self._finish_reason: FinishReason | None = None
        self._kind: RowKind = "recompute"
        self._threshold = 0.0
        self._enter_block(self._n_unmasked // self._block_length)

    def plan(self, kind: RowKind, threshold: float) -> None:
        """See Course."""
        self._kind, self._threshold = kind, threshold

    def run(self) -> StepOutput | None:
        """See Course."""
        kind, threshold = self._kind, self._threshold
        if kind == "rebuild":
            return None
        stride = self._strides.get(threshold)
        if stride is None:
            stride = self._strides[threshold] = self._source.stride(self._request, threshold)
        self._advanced += stride
        self._step += 1
        block, before, end = self._block, self._n_unmasked, self._block_end
        reached = int(self._advanced + _EPSILON)
        if reached >= end:
            reached = end
        self._n_unmasked = reached
        if reached == end:
            self._end_block()
        n_new = reached - before
        return StepOutput(
            request_id=self._request_id,
            step=self._step,
            block=block,
            kind=kind,
            threshold=threshold,
            positions=list(range(before, reached)),
            tokens=[0] * n_new,
            confidences=[0.0] * n_new,
            stats=NOT_RECORDED,
            n_unmasked=reached,
            n_block_masked=end - reached,
            finish_reason=self._finish_reason,
        )

    def committed(self) -> None:
        """See Course."""
        if self._finish_reason is None:
            self._source.committed[self._request_id] = self._advanced
        else:
            self._source.committed.pop(self._request_id, None)

    def end(self) -> None:
        """See Course."""

    def _end_block(self) -> None:
        if self._n_unmasked == self._n_output:
            self._finish_reason = "length"
        else:
            self._enter_block(self._block + 1)

    def _enter_block(self, block: int) -> None:
        self._block = block
        self._block_end = min((block + 1) * self._block_length, self._n_output)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between the points, constant beyond them."""
    right = bisect_left(xs, x)
    if right == 0 or (right < len(xs) and xs[right] == x):
        return ys[min(right, len(ys) - 1)]
    if right == len(xs):
        return ys[-1]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])
