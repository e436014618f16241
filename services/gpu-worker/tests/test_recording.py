"""`dilaserve record`: what is planned, what is written down, and going on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from dilaserve.errors import InvalidRequestError
from dilaserve.messages import CacheMode
from dilaserve.recording import (
    RecordedStep,
    RecordingError,
    complete_runs,
    is_complete,
    prompt_digest,
    read_runs,
)
from dilaserve.store.records import DecodingSpec
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.engine.types import NeverFitsError
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.record_command import record
from dilaserve_gpu_worker.recording import PlannedRun, Prompt, Recorder, plan_runs, read_prompts

PROMPTS = [
    Prompt(prompt_id=f"p{n}", prompt_ids=[1 + n, 2, 3] * (1 + n), n_output=20 + 4 * n)
    for n in range(5)
]


def without_time(runs: list[list[RecordedStep]]) -> dict[str, list[dict[str, object]]]:
    return {
        run[0].run_id: [
            {name: getattr(step, name) for name in step.__struct_fields__ if name != "latency_ms"}
            for step in run
        ]
        for run in runs
    }


def test_a_plan_has_every_threshold_and_runs_that_switch() -> None:
    plan = plan_runs(PROMPTS, (0.4, 0.9), n_switching=20, last_switch=5, seed=1)
    assert len({run.run_id for run in plan}) == len(plan)
    of_first = [run for run in plan if run.prompt_id == "p0"]
    assert [run.thresholds for run in of_first[:2]] == [(0.4,), (0.9,)]
    switching = of_first[2:]
    assert {len(run.thresholds) for run in switching} == {2, 3, 4, 5}
    assert {threshold for run in switching for threshold in run.thresholds} == {0.4, 0.9}
    run = PlannedRun(PROMPTS[0], (0.4, 0.9, 0.5))
    assert [run.threshold(step) for step in (1, 2, 3, 4, 99)] == [0.4, 0.9, 0.5, 0.5, 0.5]


def test_a_plan_depends_on_seed_and_prompt_only() -> None:
    plan = plan_runs(PROMPTS, seed=1)
    assert plan_runs(PROMPTS[3:], seed=1) == [run for run in plan if run.prompt in PROMPTS[3:]]
    assert plan_runs(PROMPTS, seed=2) != plan


def test_a_run_is_planned_once_and_goes_by_what_it_does() -> None:
    first, second = PROMPTS[:2]
    longer = msgspec.structs.replace(first, n_output=99)
    same = msgspec.structs.replace(first, prompt_id="of another name")
    plan = plan_runs([first, same, longer, second], (0.5, 0.9), n_switching=0)
    assert [(run.prompt.prompt_ids, run.prompt.n_output) for run in plan[::2]] == [
        (first.prompt_ids, first.n_output),
        (first.prompt_ids, 99),
        (second.prompt_ids, second.n_output),
    ]
    on = plan_runs([first], (0.5,), n_switching=0, ignore_eos=True)
    assert on[0].run_id not in {run.run_id for run in plan}


@pytest.mark.parametrize("cache_mode", ["dual", "none"])
def test_recorded_steps_are_those_of_each_run_alone(model: Model, cache_mode: CacheMode) -> None:
    plan = plan_runs(PROMPTS, (0.3, 0.9), n_switching=2, ignore_eos=True)

    def recorded(concurrency: int) -> list[list[RecordedStep]]:
        recorder = Recorder(model, "m", cache=cache_mode, block_length=8, concurrency=concurrency)
        return list(recorder.record(plan))

    runs = recorded(4)
    assert without_time(runs) == without_time(recorded(1))
    assert all(is_complete(run) for run in runs)
    by_id = {run[0].run_id: run for run in runs}
    assert by_id.keys() == {run.run_id for run in plan}
    for planned in plan:
        run = by_id[planned.run_id]
        assert [step.threshold for step in run] == [planned.threshold(step.step) for step in run]
        assert run[-1].n_unmasked == planned.prompt.n_output
        if len(planned.thresholds) == 1:
            spec = DecodingSpec(
                n_output=planned.prompt.n_output, block_length=8, seed=0, ignore_eos=True
            )
            alone = denoise_alone(
                model,
                planned.prompt.prompt_ids,
                spec,
                cache_mode=cache_mode,
                threshold=planned.thresholds[0],
            )
            assert alone.nfe == len(run)


def test_no_runs_no_steps(model: Model) -> None:
    assert list(Recorder(model, "m").record([])) == []


def test_room_is_made_for_runs_that_there_are(model: Model) -> None:
    """A concurrency beyond them costs neither memory nor time."""
    plan = plan_runs(PROMPTS[:1], (0.9,), n_switching=0)
    (run,) = Recorder(model, "m", block_length=8, concurrency=10**9).record(plan)
    assert is_complete(run)


@pytest.mark.parametrize("n_output", [511, 10**12, 10**40])
def test_a_run_that_is_longer_than_the_model_is_refused_before_any_begins(
    model: Model, n_output: int
) -> None:
    """And before room is made for it."""
    long = msgspec.structs.replace(PROMPTS[0], prompt_ids=[1, 2], n_output=n_output)
    plan = plan_runs([*PROMPTS[1:], long], (0.9,), n_switching=0)
    with pytest.raises(NeverFitsError, match="more than the model's max_sequence_length"):
        next(Recorder(model, "m", block_length=8).record(plan))


def test_more_runs_than_can_be_planned_are_refused(tmp_path: Path, arguments: list[object]) -> None:
    result = invoke(*arguments, "--out", tmp_path / "out", "--switching", 10**12)
    assert (result.exit_code, "less than or equal to 1000" in result.output) == (2, True)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "more": 0}\n\n{"prompt_ids": [], "n_output": 9}\n')
    assert read_prompts(path, n_output=64) == [
        Prompt(prompt_id=prompt_digest([1, 2]), prompt_ids=[1, 2], n_output=64),
        Prompt(prompt_id=prompt_digest([]), prompt_ids=[], n_output=9),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "text"}\n', "line 1 has no prompt_ids; .*dilaserve tokenize"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [-1]}\n', r"line 2: .*`\$.prompt_ids"),
    ],
)
def test_what_is_no_prompt_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        read_prompts(path, n_output=1)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_prompts(tmp_path / "none", n_output=1)


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(record)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def arguments(tmp_path: Path, make_folder: Callable[..., Path]) -> list[object]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [n, 5]}) + "\n" for n in range(4)))
    options = ["--output-len", 20, "--block", 8, "--concurrency", 3, "--ignore-eos"]
    return [path, "--model", make_folder(), "--model-name", "m", *options]


def test_the_command_goes_on_where_it_was(tmp_path: Path, arguments: list[object]) -> None:
    whole, halved = tmp_path / "whole.jsonl", tmp_path / "halved.jsonl"
    result = invoke(*arguments, "--out", whole)
    assert result.exit_code == 0, result.output
    assert "has 32 runs" in result.output
    data = whole.read_bytes()
    halved.write_bytes(data[: len(data) // 2])
    n_before = len(complete_runs(halved))
    assert 0 < n_before < 32
    assert invoke(*arguments, "--out", halved).exit_code == 0
    assert without_time(read_runs([halved])) == without_time(read_runs([whole]))
    again = invoke(*arguments, "--out", halved)
    assert again.output == f"{halved} has 32 runs, 0 of them new (0 steps)\n"


@pytest.mark.parametrize(("how", "is_packed"), [([], True), (["--pack-weights", "off"], False)])
def test_weights_are_packed_where_that_pays_unless_told(
    tmp_path: Path,
    arguments: list[object],
    packed_matrices: list[object],
    how: list[str],
    is_packed: bool,
) -> None:
    few = ["--out", tmp_path / "steps.jsonl", "--thresholds", "0.9", "--switching", 0]
    assert invoke(*arguments, *few, *how).exit_code == 0
    assert bool(packed_matrices) == is_packed


@pytest.mark.parametrize(
    "changes",
    [["--output-len", 12], ["--seed", 1], ["--thresholds", "0.55"], ["--last-switch", 99], None],
)
def test_what_the_file_has_not_is_added(
    tmp_path: Path, arguments: list[object], changes: list[object] | None
) -> None:
    """`None`: other prompts, and without --ignore-eos."""
    out = tmp_path / "steps.jsonl"
    few = ["--switching", 1, "--out", out]
    assert invoke(*arguments, *few).exit_code == 0
    before = complete_runs(out)
    if changes is None:
        other = tmp_path / "other.jsonl"
        other.write_text('{"prompt_ids": [50, 51, 52]}\n')
        arguments = [other, *arguments[1:-1]]
    result = invoke(*arguments, *few, *(changes or []))
    assert result.exit_code == 0, result.output
    new = complete_runs(out) - before
    assert before < complete_runs(out)
    assert f"has {len(complete_runs(out))} runs, {len(new)} of them new" in result.output


def test_interrupted_it_keeps_what_it_has(
    tmp_path: Path, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Recorder.record

    def interrupted(self: Recorder, runs: list[PlannedRun]) -> object:
        for number, steps in enumerate(original(self, runs)):
            if number == 7:
                raise KeyboardInterrupt
            yield steps

    monkeypatch.setattr(Recorder, "record", interrupted)
    out = tmp_path / "out.jsonl"
    result = invoke(*arguments, "--out", out)
    assert result.exit_code == 130
    assert "has 7 of 32 runs; the same command goes on" in result.output
    assert len(complete_runs(out)) == 7


@pytest.mark.parametrize("changes", [["--model-name", "n"], ["--cache", "none"], ["--block", 4]])
def test_runs_that_nobody_could_tell_apart_are_not_mixed(
    tmp_path: Path, arguments: list[object], changes: list[object]
) -> None:
    out = tmp_path / "out.jsonl"
    few = [*arguments, "--thresholds", "0.5", "--switching", 0, "--out", out]
    assert invoke(*few).exit_code == 0
    before = out.read_bytes()
    error = invoke(*few, *changes).exception
    assert isinstance(error, RecordingError)
    assert "give another --out" in str(error)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["", "\n\n", '{"a":' + 100_000 * "["])
def test_useless_prompts_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"prompts\.jsonl"):
        read_prompts(path, n_output=8)


@pytest.mark.parametrize("thresholds", ["0.5,x", "", "0.5,1.5", "0.5,0.5"])
def test_thresholds_are_checked(arguments: list[object], tmp_path: Path, thresholds: str) -> None:
    result = invoke(*arguments, "--out", tmp_path / "out", "--thresholds", thresholds)
    assert result.exit_code == 2
    assert "different numbers from 0 to 1" in result.output.replace("\n", " ").replace("│ ", "")
