"""T_c from recorded steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dilaserve.messages import ConfidenceStats
from dilaserve.recording import RecordedStep, StepWriter
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.snapshot import Pace, PlanningError

STATS = ConfidenceStats(min=0.1, q25=0.2, median=0.3, mean=0.3, q75=0.4)


def run(
    run_id: str, thresholds: list[float], n_output: int, *, ends: bool = True
) -> list[RecordedStep]:
    """A step at each threshold, which together unmask all tokens."""
    n = len(thresholds)
    return [
        RecordedStep(
            model_id="m",
            prompt_id=run_id,
            run_id=run_id,
            n_output=n_output,
            block_length=32,
            step=step,
            kind="cache",
            block=0,
            n_unmasked=n_output * step // n,
            n_block_masked=0,
            threshold=threshold,
            confidence=STATS,
            latency_ms=1.0,
            finish_reason="length" if ends and step == n else None,
        )
        for step, threshold in enumerate(thresholds, 1)
    ]


def test_tokens_over_steps_of_runs_at_one_threshold(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepWriter(path) as writer:
        writer.write(run("a", [0.9] * 8, 32))
        writer.write(run("b", [0.9] * 16, 32))
        writer.write(run("c", [0.5] * 4, 32))
        writer.write(run("changed", [0.9, 0.5], 32))
        writer.write(run("unfinished", [0.5] * 2, 32, ends=False))
    assert load_paces(path) == (
        Pace(threshold=0.5, tokens_per_step=8.0),
        Pace(threshold=0.9, tokens_per_step=64 / 24),
    )


def test_table_of_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(
        msgspec.json.encode(
            {"n_output": 256, "thresholds": [0.5, 0.9], "rows": [[30, 90], [34, 70]]}
        )
    )
    assert load_paces(path) == (
        Pace(threshold=0.5, tokens_per_step=8.0),
        Pace(threshold=0.9, tokens_per_step=3.2),
    )


def test_recording_without_whole_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepWriter(path) as writer:
        writer.write(run("changed", [0.9, 0.5], 32))
    with pytest.raises(PlanningError, match=r"hold no whole request .*`dilaserve record`"):
        load_paces(path)


def test_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match=r"cannot be read: No such file .*; give the lines of"):
        load_paces(tmp_path / "counts.json")


def test_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text("{}")
    with pytest.raises(
        PlanningError, match=r"step counts .*counts\.json are malformed: .*`dilaserve record`"
    ):
        load_paces(path)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [[30, 90], [34]]},
        {"rows": [[30, 90, 3]]},
        {"rows": [[0, 90]]},
        {"n_output": 0},
        {"thresholds": [0.5, 1.5]},
    ],
)
def test_table_that_makes_no_sense_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "counts.json"
    table = {"n_output": 256, "thresholds": [0.5, 0.9], "rows": [[30, 90]], **change}
    path.write_bytes(msgspec.json.encode(table))
    with pytest.raises(
        PlanningError, match=r"step counts .*counts\.json are malformed: .*`dilaserve record`"
    ):
        load_paces(path)
