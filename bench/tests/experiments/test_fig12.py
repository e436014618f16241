"""The planner through the day: what it is fed, and that it goes on from what it chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments import fig12
from dilaserve_bench.experiments.fig12 import FIGURE_12
from dilaserve_bench.experiments.page import as_text
from dilaserve_reconfigurator.monitor import Monitor

from .helpers import session


def test_a_plan_for_each_slot_of_each_day(tmp_path: Path) -> None:
    with session(tmp_path / "points", n_seeds=1) as asked:
        document = FIGURE_12.run(asked)
    assert [(row.peak, row.slot) for row in document.rows] == [
        (peak, slot) for peak in (2, 4, 6, 8) for slot in (1, 2)
    ]
    for row in document.rows:
        assert sum(n * degree for n, degree in zip(row.mix, (1, 2, 4), strict=True)) == 16
    first = document.rows[0]
    assert first.rate == pytest.approx(2.65 * 2 / 10, rel=0.2)
    assert first.published == [0, 0, 4]
    assert set(document.found["changes"]) == {"2", "4", "6", "8"}
    text = as_text(FIGURE_12.page(document), is_quick=True, is_complete=True)
    assert "peak 8: rate" in text
    assert FIGURE_12.draw is not None
    assert len(FIGURE_12.draw(document).axes) == 4


def test_every_arrival_reaches_the_monitor_once() -> None:
    key = fig12._Key(peak=8, overhead=1.0, n_slots=3, seed=0)
    arrivals = fig12._arrivals(key)
    monitor = Monitor(window_s=300.0, gap_s=2.0)
    told = [fig12._watch(monitor, arrivals, slot * 300.0, 300.0) for slot in (1, 2, 3)]
    assert sum(told) == len(arrivals)
