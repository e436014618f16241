"""T_c, the tokens that a step unmasks at each threshold, from recorded steps of the served model.

Reads the lines of `dilaserve record`, or a table of step counts. Assumes nothing of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dilaserve.recording import RecordedStep, is_complete, read_runs
from dilaserve_reconfigurator.snapshot import Pace, PlanningError

__all__ = ["load_paces", "paces_of_runs"]


REMEDY = (
    "give the lines of `dilaserve record` (.jsonl), or a table such as "
    '{"n_output": 256, "thresholds": [0.5, 0.9], "rows": [[38, 74]]} (.json)'
)


class _StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of whole requests of one length: a row per request, a column per threshold."""

    n_output: Annotated[int, Meta(ge=1)]
    thresholds: Annotated[list[Annotated[float, Meta(gt=0.0, le=1.0)]], Meta(min_length=1)]
    rows: Annotated[list[list[Annotated[int, Meta(ge=1)]]], Meta(min_length=1)]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.thresholds):
                raise ValueError(f"row {row} has not one count for each of {self.thresholds}")


def load_paces(path: Path) -> tuple[Pace, ...]:
    """Ascending by threshold. Raises PlanningError or RecordingError, naming the file."""
    paces = _of_counts(path) if path.suffix == ".json" else paces_of_runs(read_runs([path]))
    if not paces:
        raise PlanningError(
            f"recorded steps {path} hold no whole request at one threshold; record some with "
            "`dilaserve record`"
        )
    return paces


def paces_of_runs(runs: Iterable[Sequence[RecordedStep]]) -> tuple[Pace, ...]:
    """Tokens over steps of all whole runs at one threshold each. Runs that changed theirs are left
    out: requests that are slow get low thresholds, which would make these look slow."""
    n_tokens: dict[float, int] = defaultdict(int)
    n_steps: dict[float, int] = defaultdict(int)
    for run in runs:
        thresholds = {step.threshold for step in run}
        if is_complete(run) and len(thresholds) == 1:
            n_tokens[run[0].threshold] += run[-1].n_unmasked
            n_steps[run[0].threshold] += len(run)
    return tuple(
        Pace(threshold=threshold, tokens_per_step=n_tokens[threshold] / n_steps[threshold])
        for threshold in sorted(n_steps)
        if n_tokens[threshold]
    )


def _of_counts(path: Path) -> tuple[Pace, ...]:
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=_StepCounts)
    except OSError as error:
        raise PlanningError(
            f"step counts {path} cannot be read: {error.strerror}; {REMEDY}"
        ) from error
    except msgspec.DecodeError as error:
        raise PlanningError(f"step counts {path} are malformed: {error}; {REMEDY}") from error
    columns = zip(*counts.rows, strict=True)
    return tuple(
        Pace(threshold=threshold, tokens_per_step=counts.n_output * len(column) / sum(column))
        for threshold, column in sorted(zip(counts.thresholds, columns, strict=True))
    )
