"""The planner against the oracle: its plumbing, with few mixes and short windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.data.reconfig import published_plans
from dilaserve_bench.experiments import planning
from dilaserve_bench.experiments.oracle import mix_name, mixes
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def test_a_row_for_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(mixes(planning.NODES))
    tried = [m for m in every if mix_name(m.items()) in {"16xtp1", "8xtp1,2xtp4", "4xtp4"}]
    monkeypatch.setattr(planning, "mixes", lambda _: iter(tried))
    monkeypatch.setattr(planning, "QUICK_S", 0.5)
    monkeypatch.setattr(planning, "_choose", lambda *_, **__: {1: 16, 2: 0, 4: 0})
    with session(tmp_path / "points", n_seeds=1) as asked:
        document = planning.EXPERIMENT.run(asked)
    assert [row.window for row in document.rows] == [0, 12]
    for row in document.rows:
        assert row.chosen.mix == row.kept.mix == row.published.mix == row.traced.mix == "16xtp1"
        assert row.regret == pytest.approx(row.chosen.mean_s / row.best.mean_s - 1, abs=1e-5)
        assert row.best.mean_s <= row.chosen.mean_s
    page = planning.EXPERIMENT.page(document)
    assert "regret" in as_text(page, is_quick=True, is_complete=document.is_complete)


def test_planner_chooses_low_degrees_under_load() -> None:
    present = {1: 0, 2: 0, 4: 4}
    assert planning._choose(20.0, 1.594, present, min_gain=0.1)[1] >= 8


def test_what_was_published_for_a_load_and_for_a_time() -> None:
    plans = published_plans()
    assert plans.at_rate(0.5) == (0, 0, 4)
    assert plans.at_rate(8.1) == plans.at_rate(20.0) == (16, 0, 0)
    assert plans.at_rate(1.0173 * 4) == (16, 0, 0)
    assert [plans.at_minute(minute) for minute in (2.5, 32.5, 62.5)] == [
        (16, 0, 0),
        (8, 0, 2),
        (16, 0, 0),
    ]
    for mixes_chosen in plans.chosen.values():
        assert all(tp1 + 2 * tp2 + 4 * tp4 == 16 for tp1, tp2, tp4 in mixes_chosen)
