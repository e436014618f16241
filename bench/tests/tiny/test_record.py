"""Recorded runs of the tiny model: planned the same every time, resumable, right at each step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dilaserve.recording import complete_runs, is_complete, read_runs
from dilaserve_bench.tiny.evaluate import Case, denoise, held_out_cases
from dilaserve_bench.tiny.record import (
    THRESHOLDS,
    plan_runs,
    plan_uneven,
    record,
    uneven_cases,
)
from dilaserve_gpu_worker.weights import load_model

TINY = Path(__file__).parents[3] / "models" / "tiny"
SEED = 5


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    return held_out_cases(tokenizer, ["fill", "walk"], 2, SEED)


def test_a_plan_is_the_same_every_time_and_has_every_threshold(cases: list[Case]) -> None:
    plan = plan_runs(cases, SEED)
    assert plan == plan_runs(cases, SEED)
    assert len({run.run_id for run in plan}) == len(plan) == 4 * (len(THRESHOLDS) + 3)
    for prompt_id in {run.prompt_id for run in plan}:
        of_prompt = [run.thresholds for run in plan if run.prompt_id == prompt_id]
        assert of_prompt[: len(THRESHOLDS)] == [(threshold,) for threshold in THRESHOLDS]


def test_steps_are_those_of_the_engine(cases: list[Case]) -> None:
    torch.set_num_threads(1)
    model = load_model(TINY)
    plan = plan_runs(cases, SEED)
    runs = {run[0].run_id: run for run in record(model, "tiny", plan)}
    assert runs.keys() == {run.run_id for run in plan}
    for planned in plan:
        run = runs[planned.run_id]
        assert is_complete(run)
        assert [step.threshold for step in run] == [planned.threshold(step.step) for step in run]
        assert run[-1].n_unmasked == run[-1].n_output or run[-1].finish_reason == "stop"
        assert all(0 <= step.confidence.min <= step.confidence.q75 <= 1 for step in run)
    for threshold in THRESHOLDS:
        n_steps = [n for _, n in denoise(model, cases, "dual", lambda *_, t=threshold: t)]
        fixed = [run for run in plan if run.thresholds == (threshold,)]
        assert [len(runs[run.run_id]) for run in fixed] == n_steps


def test_uneven_problems_end_early_unless_that_is_ignored() -> None:
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    cases = uneven_cases(tokenizer, ["echo", "shift"], 2, SEED)
    assert cases == uneven_cases(tokenizer, ["echo", "shift"], 2, SEED)
    plans = {ignored: plan_uneven(cases, SEED, ignore_eos=ignored) for ignored in (False, True)}
    run_ids = [run.run_id for plan in plans.values() for run in plan]
    assert len(set(run_ids)) == len(run_ids) == 2 * 4 * 2 * (len(THRESHOLDS) + 3)
    prompt_ids = [{run.prompt_id for run in plan} for plan in plans.values()]
    assert prompt_ids[0] == prompt_ids[1]
    assert len(prompt_ids[0]) == 4
    model = load_model(TINY)
    ends = {
        ignored: [run[-1] for run in record(model, "tiny", plan)] for ignored, plan in plans.items()
    }
    assert any(end.finish_reason == "stop" for end in ends[False])
    assert any(end.n_unmasked < end.n_output for end in ends[False])
    assert all(end.n_unmasked == end.n_output for end in ends[True])


def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "dilaserve_bench.tiny.record", "--model", str(TINY)]
    command += ["--problems", "1", "--seed", str(SEED), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    whole = out.read_bytes()
    assert len(complete_runs(out)) == 6 * 8
    out.write_bytes(whole[: len(whole) // 2])
    subprocess.run(command, check=True, capture_output=True)
    assert complete_runs(out) == {run[0].run_id for run in read_runs([out])}
    assert len(complete_runs(out)) == 6 * 8
