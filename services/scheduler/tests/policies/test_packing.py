"""How full passes are, against playing it."""

from __future__ import annotations

import random

import pytest

from dilaserve_scheduler.policies.packing import loads


def play(n_rows: int, share: float, n_together: int, n_passes: int) -> dict[tuple[int, int], float]:
    """The share of passes by (recomputing, cached) rows."""
    rng = random.Random(0)
    due = n_rows
    seen: dict[tuple[int, int], float] = {}
    for _ in range(n_passes):
        load = min(due, n_together), n_rows - due
        seen[load] = seen.get(load, 0.0) + 1 / n_passes
        due += sum(rng.random() < share for _ in range(sum(load))) - load[0]
    return seen


@pytest.mark.parametrize(
    ("n_rows", "share", "n_together"), [(6, 0.12, 1), (6, 0.2, 2), (3, 0.5, 1), (12, 0.1, 1)]
)
def test_passes_are_as_full_as_when_played(n_rows: int, share: float, n_together: int) -> None:
    played = play(n_rows, share, n_together, 40_000)
    found = {(full, cached): chance for full, cached, chance in loads(n_rows, share, n_together)}
    assert sum(found.values()) == pytest.approx(1.0)
    for load in found.keys() | played.keys():
        assert found.get(load, 0.0) == pytest.approx(played.get(load, 0.0), abs=0.012)


def test_without_a_limit_rows_recompute_independently() -> None:
    quarter = [(0, 2, 0.25), (1, 1, 0.5), (2, 0, 0.25)]
    assert [pytest.approx(load) for load in loads(2, 0.5, 2)] == quarter
    assert [pytest.approx(load) for load in loads(2, 0.5, 99)] == quarter


def test_all_steps_may_recompute_and_none() -> None:
    assert [pytest.approx(load) for load in loads(3, 1.0, 1)] == [(1, 0, 1.0)]
    assert [pytest.approx(load) for load in loads(3, 0.0, 1)] == [(0, 3, 1.0)]
