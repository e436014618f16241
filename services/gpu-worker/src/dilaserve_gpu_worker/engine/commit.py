"""From logits to canvases: what one step does to each of its rows, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dilaserve.messages import ConfidenceStats, StepKind
from dilaserve_gpu_worker.engine.confidence import confidence_stats
from dilaserve_gpu_worker.engine.sequence import Floats, Ints, Row
from dilaserve_gpu_worker.engine.types import StepOutput
from dilaserve_gpu_worker.engine.unmask import (
    Bools,
    Candidates,
    check_finite,
    choose_on_device,
    chosen_of,
    select,
)
from dilaserve_gpu_worker.transfer import fetch

_SEED_BITS = (1 << 64) - 1


def unmask_rows(
    rows: Sequence[Row], logits_MV: Tensor, outlook_K: Tensor, mask_id: int
) -> list[StepOutput]:
    """Unmask in the rows' canvases what their logits decide, and keep how confident the model is
    of what they only look at. `logits_MV` holds one row per candidate, request by request, then
    padding; it is overwritten. All that the device computed comes in one transfer.

    Rows that only rebuild have no candidates, and no report.
    """
    committing = [row for row in rows if row.kind != "rebuild"]
    candidates = _gather_candidates(committing)
    chosen_2M = choose_on_device(logits_MV, mask_id, candidates)
    fetched = fetch(torch.cat((outlook_K.double(), chosen_2M.flatten())))
    _note_outlook(rows, fetched[: len(outlook_K)])
    chosen = chosen_of(fetched[len(outlook_K) :].reshape(2, -1), len(candidates.request_N))
    return _commit(committing, candidates, *chosen) if committing else []


def _note_outlook(rows: Sequence[Row], confidences: Floats) -> None:
    """Row by row, then padding."""
    start = 0
    for row in rows:
        end = start + len(row.outlook)
        row.sequence.confidences[row.outlook] = confidences[start:end]
        start = end
    check_finite(confidences[:start])


def _commit(
    rows: Sequence[Row], candidates: Candidates, tokens: Ints, confidences: Floats
) -> list[StepOutput]:
    is_selected = select(
        candidates,
        confidences,
        threshold_R=np.array([row.threshold for row in rows]),
        quota_R=np.array([row.sequence.quota or 0 for row in rows]),
    )
    ends = np.cumsum([len(row.candidates) for row in rows]).tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    for row, part in zip(rows, parts, strict=True):
        _commit_row(row, tokens[part], confidences[part], is_selected[part])
    stats = confidence_stats([row.sequence.confidences for row in rows])
    return [
        _report(row, tokens[part], confidences[part], is_selected[part], row_stats)
        for row, part, row_stats in zip(rows, parts, stats, strict=True)
    ]


def _gather_candidates(rows: Sequence[Row]) -> Candidates:
    lengths = [len(row.candidates) for row in rows]
    specs = [row.sequence.spec for row in rows]
    return Candidates(
        request_N=np.repeat(np.arange(len(rows)), lengths),
        position_N=np.concatenate([np.empty(0, np.int64), *(row.candidates for row in rows)]),
        step_N=np.repeat(np.array([row.sequence.step + 1 for row in rows], np.int64), lengths),
        seed_N=np.repeat(np.array([s.seed & _SEED_BITS for s in specs], np.uint64), lengths),
        temperature_N=np.repeat([float(s.temperature) for s in specs], lengths),
        top_p_N=np.repeat([float(s.top_p) for s in specs], lengths),
    )


def _commit_row(row: Row, tokens: Ints, confidences: Floats, is_selected: Bools) -> None:
    row.sequence.confidences[row.candidates] = confidences
    row.sequence.commit(row.candidates[is_selected], tokens[is_selected])


def _report(
    row: Row, tokens: Ints, confidences: Floats, is_selected: Bools, stats: ConfidenceStats
) -> StepOutput:
    sequence = row.sequence
    kind: StepKind = "cache" if row.kind == "cache" else "recompute"
    return StepOutput(
        request_id=sequence.request_id,
        step=sequence.step,
        block=row.block,
        kind=kind,
        threshold=row.threshold,
        positions=row.candidates[is_selected].tolist(),
        tokens=tokens[is_selected].tolist(),
        confidences=confidences[is_selected].tolist(),
        stats=stats,
        n_unmasked=sequence.n_unmasked,
        n_block_masked=sequence.n_block_masked(row.block),
        finish_reason=sequence.finish_reason,
        # A first step that finds its cache filled has had it rebuilt.
        rebuilt=kind == "cache" and sequence.step == sequence.n_inherited + 1,
    )
