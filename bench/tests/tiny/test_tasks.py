"""The tasks judge answers by their rules, and training never sees a held-out problem."""

import pytest

from dilaserve_bench.tiny.layout import DATA_WIDTH
from dilaserve_bench.tiny.tasks import (
    LONG_CHAINS,
    SERVED,
    TASKS,
    Problem,
    check_fill,
    held_out_problem,
    running_total,
    training_rng,
    walk_positions,
)

LENGTHS = (32, 64, 96)


def held_out(task: str, n: int = 20) -> list[Problem]:
    return [held_out_problem(task, length, 0, i) for length in LENGTHS for i in range(n)]


@pytest.mark.parametrize("task", TASKS)
def test_own_answer_is_right_and_a_changed_one_wrong(task: str) -> None:
    for problem in held_out(task):
        text = "".join(problem.answer)
        assert len(problem.data) == len(problem.answer) <= DATA_WIDTH
        assert TASKS[task].check(problem, text)
        changed = ("b" if text[0] != "b" else "c") + text[1:]
        if task == "fill":
            changed = text[1] + text[1:]
        assert not TASKS[task].check(problem, changed)
        assert not TASKS[task].check(problem, text[: len(text) // 4])
        assert not TASKS[task].check(problem, "")


def test_running_total_wraps_at_ten_and_restarts_at_a_bar() -> None:
    assert running_total(tuple("3527|44")) == tuple("3807|48")


def test_walk_wraps_around_the_torus_and_restarts() -> None:
    assert "".join(walk_positions(["90", "E", "S", "34", "N", "W"])) == "900009343525"


def test_addition_answers_with_sixteen_digits_for_every_pair() -> None:
    problem = held_out_problem("add", 64, 0, 1)
    first, second = problem.prompt.removeprefix("Add ").split("; ")
    sums = [sum(int(number) for number in pair.split(" and ")) for pair in (first, second)]
    assert [int(text) for text in "".join(problem.answer).split()] == sums


def test_shift_moves_letters_and_keeps_spaces() -> None:
    problem = held_out_problem("shift", 32, 0, 0)
    places = int(problem.parameter)
    for datum, token in zip(problem.data, problem.answer, strict=True):
        expected = " " if datum == " " else chr((ord(datum) - 97 + places) % 26 + 97)
        assert token == expected


@pytest.mark.parametrize(
    ("answer", "right"),
    [("abab", True), ("adab", True), ("abcb", False), ("aaab", False), ("ab?b", False)],
)
def test_colouring_accepts_every_valid_row_and_no_other(answer: str, right: bool) -> None:
    data = ("a", "?", "a", "?")
    assert check_fill(Problem("fill", "", " ", data, tuple("abab")), answer) is right


@pytest.mark.parametrize("task", TASKS)
def test_held_out_problems_are_not_in_the_training_stream(task: str) -> None:
    held = {problem.prompt for problem in held_out(task, 50)}
    for difficulty in (LONG_CHAINS, SERVED):
        rng = training_rng(0, 0, 0)
        trained = {TASKS[task].generate(rng, 32, difficulty).prompt for _ in range(500)}
        assert len(trained) > 490
        assert not held & trained


def test_problems_are_a_function_of_seed_and_index() -> None:
    assert held_out_problem("walk", 64, 3, 4) == held_out_problem("walk", 64, 3, 4)
    assert held_out_problem("walk", 64, 3, 4) != held_out_problem("walk", 64, 3, 5)
