"""Recorded steps survive an interrupted writer, and faults in them are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dilaserve.messages import ConfidenceStats
from dilaserve.recording import (
    RecordedStep,
    RecordingError,
    StepWriter,
    complete_runs,
    is_complete,
    read_runs,
    read_steps,
)

FLAT = ConfidenceStats(min=0.1, q25=0.2, median=0.3, mean=0.4, q75=0.5)


def step_of(number: int, run_id: str = "a", *, of: int = 3) -> RecordedStep:
    return RecordedStep(
        model_id="m",
        prompt_id="p",
        run_id=run_id,
        n_output=of,
        block_length=32,
        step=number,
        kind="recompute" if number == 1 else "cache",
        block=0,
        n_unmasked=number,
        n_block_masked=of - number,
        threshold=0.9,
        confidence=FLAT,
        latency_ms=1.5,
        finish_reason="length" if number == of else None,
    )


def run_of(run_id: str, *, of: int = 3) -> list[RecordedStep]:
    return [step_of(number, run_id, of=of) for number in range(1, of + 1)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    with StepWriter(path) as writer:
        writer.write(run_of("a"))
        writer.write(run_of("b"))
        assert writer.n_bytes == path.stat().st_size
    assert list(read_steps(path)) == run_of("a") + run_of("b")
    assert complete_runs(path) == {"a", "b"}


def test_a_line_without_its_end_is_left_out_and_cut_off_when_writing_on(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepWriter(path) as writer:
        writer.write(run_of("a"))
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_steps(path)) == run_of("a")[:2]
    assert complete_runs(path) == set()
    with StepWriter(path) as writer:
        writer.write(run_of("a"))
    assert read_runs([path]) == [run_of("a")]


def test_a_first_line_without_its_end_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"model')
    assert list(read_steps(path)) == []
    with StepWriter(path) as writer:
        writer.write([])
    assert path.read_bytes() == b""


def test_runs_may_be_interleaved_and_in_several_files(tmp_path: Path) -> None:
    a, b = run_of("a"), run_of("b")
    with StepWriter(tmp_path / "1") as writer:
        writer.write([a[0], b[0], a[1], b[1]])
    with StepWriter(tmp_path / "2") as writer:
        writer.write([b[2], a[2]])
    assert read_runs([tmp_path / "1", tmp_path / "2"]) == [a, b]


def test_a_run_begun_again_is_the_same_in_its_file_and_another_one_elsewhere(
    tmp_path: Path,
) -> None:
    """Ids are made of the numbers of prompts: recordings of two sets of prompts share them."""
    run = run_of("a")
    other = [msgspec.structs.replace(step, prompt_id="q") for step in run]
    first, second = tmp_path / "1", tmp_path / "2"
    with StepWriter(first) as writer:
        writer.write([run[0], *run])
    with StepWriter(second) as writer:
        writer.write(other)
    assert read_runs([first]) == [run]
    assert read_runs([first, second, tmp_path / "." / "1"]) == [run, other]


def test_a_run_is_complete_with_every_step_up_to_its_end() -> None:
    run = run_of("a")
    assert is_complete(run)
    assert not is_complete([])
    assert not is_complete(run[:2])
    assert not is_complete([run[0], run[2]])
    assert not is_complete(run[1:])
    assert not is_complete([msgspec.structs.replace(run[0], n_output=64), *run[1:]])


def test_no_file_has_no_runs(tmp_path: Path) -> None:
    assert complete_runs(tmp_path / "none") == set()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(msgspec.json.encode(step_of(1)) + b'\n{"step": -1}\n')
    with pytest.raises(RecordingError, match=r"steps\.jsonl, line 2: .*remove that line"):
        list(read_steps(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_output": 0},
        {"block_length": 0},
        {"step": 0},
        {"block": 1},
        {"n_unmasked": 4},
        {"n_block_masked": 4},
    ],
)
def test_a_state_that_no_canvas_has_is_named(tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / "steps.jsonl"
    with StepWriter(path) as writer:
        writer.write([step_of(1), msgspec.structs.replace(step_of(2), **changes)])
    with pytest.raises(RecordingError, match=r"steps\.jsonl, line 2: .*remove that line"):
        list(read_steps(path))


def test_too_deep_a_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"x":' + 100_000 * b"[" + b"\n")
    with pytest.raises(RecordingError, match=r"line 1: .*remove that line"):
        list(read_steps(path))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read"):
        list(read_steps(tmp_path / "none"))
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match="cannot be opened"):
        StepWriter(tmp_path / "file" / "steps.jsonl")
