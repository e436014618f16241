"""From logits to canvases: what one step does to each of its rows, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from dilaserve.messages import ConfidenceStats, StepKind
from dilaserve_gpu_worker.engine.confidence import confidence_stats
from dilaserve_gpu_worker.engine.sampling import sampling_keys
from dilaserve_gpu_worker.engine.sequence import Floats, Ints, Row
from dilaserve_gpu_worker.engine.types import StepOutput
from dilaserve_gpu_worker.engine.unmask import (
    Draws,
    check_finite,
    choose_on_device,
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
    lengths = [len(row.candidates) for row in committing]
    chosen = choose_on_device(logits_MV, mask_id, _draws_of(committing, lengths))
    outlook, tokens, confidences = fetch([outlook_K, *chosen])
    _note_outlook(rows, outlook)
    tokens, confidences = tokens[:, 0], confidences[: sum(lengths), 0]
    check_finite(confidences)
    ends = accumulate(lengths, initial=0)
    return [
        _commit(row, tokens[start:end], confidences[start:end])
        for row, (start, end) in zip(committing, pairwise(ends), strict=True)
    ]


def _draws_of(rows: Sequence[Row], lengths: Sequence[int]) -> Draws | None:
    if not [row for row in rows if row.sequence.spec.temperature]:
        return None
    specs = [row.sequence.spec for row in rows]
    temperatures = np.repeat([float(spec.temperature) for spec in specs], lengths)
    sampled = np.flatnonzero(temperatures > 0)
    seeds = np.repeat(np.array([spec.seed & _SEED_BITS for spec in specs], np.uint64), lengths)
    positions = np.concatenate([row.candidates for row in rows])
    steps = np.repeat([row.sequence.step + 1 for row in rows], lengths)
    return Draws(
        candidate_S=sampled,
        key_S=sampling_keys(seeds[sampled], positions[sampled], steps[sampled]),
        temperature_S=temperatures[sampled],
        top_p_S=np.repeat([float(spec.top_p) for spec in specs], lengths)[sampled],
    )


def _note_outlook(rows: Sequence[Row], confidences: Floats) -> None:
    """Row by row, then padding."""
    end = 0
    for row in rows:
        if len(row.outlook):
            start, end = end, end + len(row.outlook)
            row.sequence.confidences[row.outlook] = confidences[start:end]
    if end:
        check_finite(confidences[:end])


def _commit(row: Row, tokens: Ints, confidences: Floats) -> StepOutput:
    sequence = row.sequence
    sequence.confidences[row.candidates] = confidences
    stats = confidence_stats(sequence.confidences)
    is_selected = select(confidences, row.threshold, row.sequence.quota)
    positions, tokens = row.candidates[is_selected], tokens[is_selected]
    sequence.commit(positions, tokens, row.candidates[~is_selected])
    return _report(row, positions, tokens, confidences[is_selected], stats)


def _report(
    row: Row, positions: Ints, tokens: Ints, confidences: Floats, stats: ConfidenceStats
) -> StepOutput:
    sequence = row.sequence
    kind: StepKind = "cache" if row.kind == "cache" else "recompute"
    return StepOutput(
        request_id=sequence.request_id,
        step=sequence.step,
        block=row.block,
        kind=kind,
        threshold=row.threshold,
        positions=positions.tolist(),
        tokens=tokens.tolist(),
        confidences=confidences.tolist(),
        stats=stats,
        n_unmasked=sequence.n_unmasked,
        n_block_masked=sequence.n_block_masked(row.block),
        finish_reason=sequence.finish_reason,
        # A first step that finds its cache filled has had it rebuilt.
        rebuilt=kind == "cache" and sequence.step == sequence.n_inherited + 1,
    )
