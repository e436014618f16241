"""The one-shot table."""

from __future__ import annotations

import pytest

from dilaserve_scheduler.policies.habits import Habits, interpolate


def serve(habits: Habits, name: str, threshold: float, n_steps: int, n_new: int) -> None:
    for _ in range(n_steps):
        habits.observe(name, threshold, n_new)
    habits.ended(name, finished=True)


def test_it_starts_from_what_is_assumed() -> None:
    habits = Habits((0.5, 0.7, 0.9), {0.5: 0.2, 0.9: 0.4})
    assert habits.steps_per_token == pytest.approx([0.2, 0.3, 0.4])
    assert habits.steps(100, 4) == pytest.approx([20, 30, 40])
    assert habits.steps(100, 25) == pytest.approx([25, 30, 40])  # a step a block at least
    assert Habits((0.9,), {0.9: 3.0}).steps(10, 2) == [10]  # a step a token at most


def test_a_model_that_is_slower_throughout_is_learned_from_any_threshold() -> None:
    habits = Habits((0.5, 0.9), {0.5: 0.2, 0.9: 0.4})
    for n in range(500):
        serve(habits, f"r{n}", 0.9, n_steps=128, n_new=1)  # 1 step a token, not 0.4
    habits.learn()
    assert habits.steps_per_token[1] == pytest.approx(1.0, rel=0.05)
    assert habits.steps_per_token[0] == pytest.approx(0.5, rel=0.05)


def test_slow_requests_at_low_thresholds_do_not_make_these_look_slow() -> None:
    """Half of the requests are twice as slow as the others, and only those are sped up."""
    habits = Habits((0.5, 0.9), {0.5: 0.25, 0.9: 0.5})
    for n in range(400):
        serve(habits, f"fast{n}", 0.9, n_steps=40, n_new=3)  # 1/3 step a token
        for _ in range(60):
            habits.observe(f"slow{n}", 0.9, 1)  # 2/3 × 3/2: a step a token
        for _ in range(30):
            habits.observe(f"slow{n}", 0.5, 2)  # twice as fast
        habits.ended(f"slow{n}", finished=True)
        habits.learn()
    low, high = habits.steps_per_token
    assert low < 0.62 * high


def test_a_guess_is_forgotten_sooner_than_what_was_measured() -> None:
    learned = []
    for is_guess in (False, True):
        habits = Habits((0.9,), {0.9: 1.0}, is_guess=is_guess)
        for n in range(8):
            serve(habits, f"r{n}", 0.9, n_steps=8, n_new=8)
        habits.learn()
        learned += habits.steps_per_token
    assert learned[0] == pytest.approx(0.8, abs=0.03)
    assert learned[1] == pytest.approx(0.35, abs=0.05)


def test_a_predictors_word_replaces_the_guess_and_is_averaged() -> None:
    habits = Habits((0.5, 0.9), {0.5: 0.2, 0.9: 0.4}, is_guess=True)
    habits.foretold([3.2, 6.4], 32)
    assert habits.steps_per_token == pytest.approx([0.1, 0.2])
    habits.foretold([9.6, 19.2], 32)
    assert habits.steps_per_token == pytest.approx([0.2, 0.4])
    assert habits.is_new


def test_what_an_early_end_makes_unneeded_came_with_the_steps_that_were_run() -> None:
    habits = Habits((0.9,), {0.9: 0.5}, is_guess=True)
    for n in range(200):
        habits.observe(f"r{n}", 0.9, 4)
        habits.complete(f"r{n}", 0.9, n_steps=2, n_tokens=32)
        habits.ended(f"r{n}", finished=True)
        habits.learn()
    assert habits.steps_per_token == pytest.approx([2 / 32], rel=0.5)  # and not 1 / 4
    assert not habits.is_new


def test_what_did_not_end_is_not_learned() -> None:
    habits = Habits((0.9,), {0.9: 0.4})
    for n in range(100):
        for _ in range(64):
            habits.observe(f"r{n}", 0.9, 1)
        habits.ended(f"r{n}", finished=False)
    habits.ended("never seen", finished=True)
    habits.learn()
    assert habits.steps_per_token == pytest.approx([0.4])


def test_interpolation_is_constant_beyond_the_ends() -> None:
    table = {0.5: 1.0, 0.9: 3.0}
    assert [interpolate(table, x) for x in (0.1, 0.5, 0.6, 0.9, 1.0)] == pytest.approx(
        [1.0, 1.0, 1.5, 3.0, 3.0]
    )
