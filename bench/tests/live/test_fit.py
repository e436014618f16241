"""How long passes take, from what was seen of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dilaserve.errors import DiLaServeError
from dilaserve.messages import ConfidenceStats, StepItemResult, StepResult
from dilaserve_bench.live.fit import fit_passes, least_squares
from dilaserve_bench.live.passes import SeenPass, Turn, seen, turns

NO_STATS = ConfidenceStats(min=0.0, q25=0.0, median=0.0, mean=0.0, q75=0.0)


def a_pass(batch: int, at_s: float, *, goes_on: bool = True, **sizes: int) -> SeenPass:
    size = {"n_tokens": 32, "n_rows": 1, "n_steps": 1, "n_new": 0, **sizes}
    return SeenPass(
        at_s=at_s, instance_id="i", batch=batch, latency_s=0.01, threshold_sum=0.9,
        goes_on=goes_on, **size,
    )  # fmt: skip


def item(step: int, *, finished: bool) -> StepItemResult:
    return StepItemResult(
        request_id=f"r{step}", epoch=1, step=step, block=0, kind="cache", threshold=0.8,
        outcome="committed", n_new=1, n_unmasked=1, n_block_masked=1, confidence=NO_STATS,
        finish_reason="length" if finished else None,
    )  # fmt: skip


def test_a_turn_is_a_pass_that_followed_another_without_a_rest() -> None:
    passes = [
        a_pass(1, 1.0),
        a_pass(2, 1.5),  # the only turn
        a_pass(4, 2.5, goes_on=False),  # one result was lost
        a_pass(5, 9.0),  # the instance had a rest
    ]
    (turn,) = turns(passes)
    assert (turn.seconds, turn.seen.batch) == (0.5, 2)


def test_what_a_result_says_of_a_pass() -> None:
    result = StepResult(
        instance_id="i", batch=3, latency_ms=20.0, n_tokens=196, n_rebuilds=1,
        items=[item(1, finished=False), item(7, finished=True)],
    )  # fmt: skip
    one = seen(result, 5.0)
    assert (one.n_rows, one.n_steps, one.n_new, one.goes_on) == (3, 2, 1, True)
    assert one.threshold_sum == pytest.approx(1.6)
    assert not seen(StepResult(instance_id="i", batch=4, latency_ms=1, n_tokens=1), 5.0).goes_on


def test_the_line_is_found_again() -> None:
    rng = random.Random(1)
    seen_turns = []
    for batch in range(400):
        n_rows = rng.randint(1, 12)
        n_tokens, n_new = n_rows * rng.randint(32, 196), rng.randint(0, 1)
        seconds = 0.003 + 4e-5 * n_tokens + 1e-3 * n_rows + 2e-3 * n_new + rng.gauss(0.0, 1e-4)
        one = a_pass(batch, 0.0, n_tokens=n_tokens, n_rows=n_rows, n_new=n_new)
        seen_turns.append(Turn(seconds=seconds, seen=one))
    fit = fit_passes(seen_turns)
    assert fit.of(500, 6, 1) == pytest.approx(0.003 + 0.02 + 0.006 + 0.002, rel=0.02)
    assert fit.left_s < 2e-4


def test_no_part_of_a_pass_takes_less_than_nothing() -> None:
    x = np.array([[1.0, 1.0, 5.0], [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [1.0, 4.0, 0.0]])
    found = least_squares(x, np.array([2.0, 3.0, 4.0, 5.0]) - 0.1 * x[:, 2])
    assert (found >= 0.0).all()
    assert found[2] == 0.0


def test_too_few_passes_are_said_to_be_so() -> None:
    with pytest.raises(DiLaServeError, match="drive the stack for longer"):
        fit_passes([])
