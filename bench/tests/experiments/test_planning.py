"""The planner against the oracle: its plumbing, with few mixes and short windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments import planning
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.planning import Outcome

from .helpers import session


def test_all_mixes_use_all_gpus() -> None:
    found = list(planning.mixes())
    assert len(found) == 25
    assert all(sum(d * n for d, n in counts.items()) == 16 for counts in found)
    assert planning.name({1: 8, 2: 0, 4: 2}) == "8xtp1,2xtp4"


def test_best_is_the_fastest_among_those_that_attain_the_most() -> None:
    outcomes = [
        Outcome(mix="fast", attainment=0.9, mean_s=1.0, mean_threshold=0.9),
        Outcome(mix="sure", attainment=0.999, mean_s=2.0, mean_threshold=0.9),
        Outcome(mix="slow", attainment=1.0, mean_s=3.0, mean_threshold=0.9),
    ]
    assert planning._best(outcomes).mix == "sure"


def test_a_row_for_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(planning.mixes())
    chosen = [mix for mix in every if planning.name(mix) in {"16xtp1", "8xtp1,2xtp4", "4xtp4"}]
    monkeypatch.setattr(planning, "mixes", lambda: iter(chosen))
    monkeypatch.setattr(planning, "QUICK_S", 0.5)
    monkeypatch.setattr(planning, "_choose", lambda *_, **__: {1: 16, 2: 0, 4: 0})
    with session(tmp_path / "points") as asked:
        document = planning.EXPERIMENT.run(asked)
    assert [row.window for row in document.rows] == [0, 12]
    for row in document.rows:
        assert row.chosen.mix == row.kept.mix == row.published.mix == "16xtp1"
        assert row.regret == pytest.approx(row.chosen.mean_s / row.best.mean_s - 1, abs=1e-5)
        assert row.best.mean_s <= row.chosen.mean_s
    page = planning.EXPERIMENT.page(document)
    assert "regret" in as_text(page, is_quick=True, is_complete=document.is_complete)


def test_planner_chooses_low_degrees_under_load() -> None:
    present = {1: 0, 2: 0, 4: 4}
    assert planning._choose(20.0, 1.594, present, min_gain=0.1)[1] >= 8
