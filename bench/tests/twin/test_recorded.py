"""Recorded steps: their sums, blocks, mixtures of thresholds, and going on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.data import data_file
from dilaserve_bench.twin.recorded import NOT_RECORDED, RecordedSource, StepTable, load_steps
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput

from .helpers import TABLE

GSM8K = load_steps(data_file("gsm8k_llada_steps.json"))


def request(
    row: int, *, n_output: int = 64, block_length: int = 16, step: int = 0, n_unmasked: int = 0
) -> EngineRequest:
    canvas = [0] * n_unmasked + [MASKED] * (n_output - n_unmasked)
    spec = DecodingSpec(n_output=n_output, block_length=block_length, seed=0)
    return EngineRequest(str(row), [0] * 8, spec, step, canvas, Credit(0.9, 99))


def source(table: StepTable = TABLE) -> RecordedSource:
    return RecordedSource(table, int)


def steps(
    source: RecordedSource, request: EngineRequest, thresholds: Iterator[float]
) -> list[StepOutput]:
    """All steps from where the request is to its end."""
    course, outputs = source.begin(request), []
    while not outputs or outputs[-1].finish_reason is None:
        course.plan("cache", next(thresholds))
        output = course.run()
        assert output is not None
        course.committed()
        outputs.append(output)
    return outputs


def always(threshold: float) -> Iterator[float]:
    while True:
        yield threshold


@pytest.mark.parametrize("column", range(5))
def test_a_kept_threshold_takes_exactly_the_recorded_steps(column: int) -> None:
    threshold = GSM8K.thresholds[column]
    for row, counts in enumerate(GSM8K.rows):
        each = request(row, n_output=256, block_length=32)
        assert len(steps(source(GSM8K), each, always(threshold))) == counts[column]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_steps_fill_block_after_block(row: int, threshold: float) -> None:
    outputs = steps(source(), request(row), always(threshold))
    positions = [position for output in outputs for position in output.positions]
    assert positions == list(range(64))
    for output in outputs:
        assert output.positions, "every step unmasks something"
        assert {position // 16 for position in output.positions} == {output.block}
        assert output.n_unmasked == output.positions[-1] + 1
        assert output.n_block_masked == (output.block + 1) * 16 - output.n_unmasked
    assert [output.step for output in outputs] == list(range(1, len(outputs) + 1))
    assert {output.block for output in outputs} == {0, 1, 2, 3}


def test_blocks_end_at_their_share_of_the_steps() -> None:
    """Row 0 takes 23 steps at 0.9: its blocks end at steps 23/4, 46/4, 69/4 and 23, rounded up."""
    outputs = steps(source(), request(0), always(0.9))
    ends = [output.step for output in outputs if output.n_block_masked == 0]
    assert ends == [6, 12, 18, 23]


def test_half_of_each_threshold_takes_half_of_the_steps_of_each() -> None:
    """Row 0: 0.5 until half of the output, 4 of 8 steps, then 0.9: the other half of 23."""
    half = iter([0.5] * 4)
    outputs = steps(source(), request(0), (next(half, 0.9) for _ in always(0)))
    assert len(outputs) == 4 + 12
    assert [output.threshold for output in outputs] == [0.5] * 4 + [0.9] * 12


def test_going_on_elsewhere_loses_nothing() -> None:
    steps_alone = steps(source(), request(0), always(0.9))
    for n_before in range(1, 23):
        moved = source()
        here = moved.begin(request(0))
        for _ in range(n_before):
            here.plan("cache", 0.9)
            last = here.run()
            here.committed()
        here.plan("cache", 0.9)
        here.run()  # computed, and never committed: the instance died
        assert last is not None
        there = request(0, step=last.step, n_unmasked=last.n_unmasked)
        assert steps(moved, there, always(0.9)) == steps_alone[n_before:]


def test_a_rebuild_is_no_step() -> None:
    course = source().begin(request(0))
    course.plan("rebuild", 0.9)
    assert course.run() is None
    course.plan("cache", 0.9)
    output = course.run()
    assert output is not None
    assert output.step == 1


def test_nothing_is_made_up() -> None:
    output = steps(source(), request(0), always(0.9))[0]
    assert output.stats is NOT_RECORDED
    assert set(output.confidences) == {0.0}


def test_other_lengths_are_in_proportion() -> None:
    assert len(steps(source(), request(0, n_output=128), always(0.9))) == 46
    assert TABLE.steps(1, 0.9, n_output=64, n_blocks=8) == 8
    assert TABLE.steps(2, 0.9, n_output=32, n_blocks=2) == 32


def test_a_short_last_block_has_a_step() -> None:
    outputs = steps(source(), request(0, n_output=40), always(0.9))
    assert len(outputs) == round(23 * 40 / 64)
    assert outputs[-1].n_unmasked == 40
    assert {output.block for output in outputs} == {0, 1, 2}


def test_between_thresholds_it_is_linear_and_beyond_constant() -> None:
    assert TABLE.steps(0, 0.8, 64, 4) == 18
    assert TABLE.steps(0, 0.3, 64, 4) == 8
    assert TABLE.steps(0, 0.95, 64, 4) == 23


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("[23, 35, 58, 101, 90]", "[23, 35]"),
        ("[23, 35, 58, 101, 90]", "[23, 35, 58, 101, 0]"),
        ('"n_output": 256', '"n_output": 0'),
        ('"n_output": 256', '"x": ' + 100_000 * "["),
        ('"thresholds": [0.5, 0.6', '"thresholds": [0.6, 0.5'),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, found: str, instead: str) -> None:
    path = tmp_path / "steps.json"
    text = data_file("gsm8k_llada_steps.json").read_text()
    assert found in text
    path.write_text(text.replace(found, instead))
    with pytest.raises(DiLaServeError, match=r"steps\.json"):
        load_steps(path)
