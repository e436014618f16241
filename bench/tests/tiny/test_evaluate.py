"""The bundled weights answer unseen problems through the engine, and the figures add up."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dilaserve_bench.tiny.evaluate import (
    Result,
    denoise,
    held_out_cases,
    markdown,
    measure,
    merge,
    wilson_interval,
)
from dilaserve_bench.tiny.tasks import TASKS
from dilaserve_gpu_worker.weights import load_model

BUNDLED = Path(__file__).parents[3] / "models" / "tiny"
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(BUNDLED)
RESULTS = [
    Result("total", 32, "none", 0.9, 50, 40, 200),
    Result("walk", 64, "none", 0.9, 50, 50, 400),
    Result("total", 32, "none", 1.0, 50, 45, 1600),
    Result("walk", 64, "none", 1.0, 50, 50, 3200),
]


def test_wilson_interval_is_the_textbook_s() -> None:
    assert wilson_interval(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0


def test_merged_results_count_every_problem_once() -> None:
    merged = merge(RESULTS[:2], "all")
    assert (merged.n_problems, merged.n_right, merged.n_steps) == (100, 90, 600)


def test_table_has_a_row_per_threshold_and_names_one_token_a_step() -> None:
    lines = markdown(RESULTS).splitlines()
    assert lines[4].startswith("| 0.9 | 90.0 · 6.0 (82.6-94.5) | 80.0 · 4.0 | 100.0 · 8.0 |")
    assert lines[5].startswith("| one token a step | 95.0 · 48.0")


def test_cases_are_of_every_task_and_length() -> None:
    cases = held_out_cases(TOKENIZER, list(TASKS), 3, seed=1)
    kinds = {(case.problem.task, len(case.problem.answer)) for case in cases}
    assert kinds == {(task, length) for task in TASKS for length in (32, 64, 96)}


def test_bundled_model_is_mostly_right_at_the_usual_threshold() -> None:
    """Eight problems of 32 tokens of each task; the model card has the real figures."""
    model = load_model(BUNDLED)
    cases = [
        case
        for case in held_out_cases(TOKENIZER, list(TASKS), 24, seed=5)
        if len(case.problem.answer) == 32
    ]
    results = measure(model, TOKENIZER, cases, "dual", 0.9)
    overall = merge(results, "all")
    assert overall.n_problems == 8 * len(TASKS)
    assert overall.n_right >= 0.8 * overall.n_problems
    assert overall.n_steps < 16 * overall.n_problems


def test_a_threshold_of_one_takes_a_step_for_every_token() -> None:
    cases = held_out_cases(TOKENIZER, ["total"], 1, seed=1)
    [(tokens, n_steps)] = denoise(load_model(BUNDLED), cases, "dual", lambda _case, _step: 1.0)
    assert (len(tokens), n_steps) == (32, 32)
