"""What a run teaches: states from which on its threshold did not change."""

from __future__ import annotations

import pytest

from dilaserve_predictor.examples import examples_of, folds, settled_from

from .made_up import run_of, runs_of


def test_a_run_at_one_threshold_teaches_every_state_but_the_last() -> None:
    run = run_of(1, lambda _: 0.7)
    examples = examples_of([run])
    assert examples.step.tolist() == list(range(len(run)))
    assert examples.steps_left.tolist() == [len(run) - done for done in range(len(run))]
    assert set(examples.thresholds.tolist()) == {0.7}
    assert examples.n_unmasked.tolist() == [0, *(step.n_unmasked for step in run[:-1])]


def test_a_run_that_switched_teaches_from_its_last_switch_on() -> None:
    run = run_of(1, lambda step: (0.9, 0.5, 0.5, 0.9)[min(step - 1, 3)])
    assert settled_from(run) == 3
    examples = examples_of([run])
    assert examples.step.tolist() == list(range(3, len(run)))
    assert examples.steps_left[0] == len(run) - 3
    assert set(examples.thresholds.tolist()) == {0.9}, "the candidate, not what was run before"


def test_a_switch_for_the_last_step_teaches_that_step() -> None:
    n_steps = len(run_of(1, lambda _: 0.9))
    run = run_of(1, lambda step: 0.5 if step >= n_steps else 0.9)
    assert examples_of([run]).steps_left.tolist() == [1]


def test_unfinished_runs_teach_nothing() -> None:
    run = run_of(1, lambda _: 0.7)
    assert len(examples_of([run[:-1], run[1:], []])) == 0


def test_no_prompt_is_on_both_sides() -> None:
    examples = examples_of(runs_of(23))
    sets = folds(examples, 5, seed=1)
    prompts = [set(examples.prompt[held_out].tolist()) for held_out in sets]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == 23
    assert sum(held_out.sum() for held_out in sets) == len(examples)


@pytest.mark.parametrize("seed", range(3))
def test_the_split_depends_on_the_seed_alone(seed: int) -> None:
    runs = runs_of(12)
    once, again = examples_of(runs), examples_of(list(reversed(runs)))
    first = [set(once.prompt[each].tolist()) for each in folds(once, 5, seed)]
    assert first == [set(again.prompt[each].tolist()) for each in folds(again, 5, seed)]
