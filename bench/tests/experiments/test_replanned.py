"""The day with a planner: its plumbing, on a day of a minute with few requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments import day as days
from dilaserve_bench.experiments.day import SYSTEMS, Day, Part
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.registry import load_experiment
from dilaserve_bench.experiments.replanned import FIGURE_8, TABLE_5, _part_rows
from dilaserve_bench.twin.configurations import Configuration, PlanNote

from .helpers import session


def test_table_and_figure_come_from_the_same_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "QUICK_SLOT_S", 2.0)
    options = {"policies": ("infaas", "dilaserve+eager"), "rates": (0.3,)}
    with session(tmp_path / "points", n_seeds=1, **options) as asked:
        table = TABLE_5.run(asked)
        monkeypatch.setattr(days, "_watched", lambda *_: pytest.fail("it was kept"))
        figure = FIGURE_8.run(asked)
    assert [(row.system, row.period) for row in table.rows] == [
        (system, period)
        for period in ("low", "loaded", "all")
        for system in ("infaas", "dilaserve+eager")
    ]
    assert {row.n_lost for row in table.rows} == {0}
    assert len(figure.rows) == 2 * 24
    assert len(figure.found["plans"]["dilaserve+eager"]) >= 20
    text = as_text(TABLE_5.page(table), is_quick=True, is_complete=True)
    assert "below infaas" in text
    assert "16×TP-1" in as_text(FIGURE_8.page(figure), is_quick=True, is_complete=True)
    assert FIGURE_8.draw is not None
    assert len(FIGURE_8.draw(figure).axes) == 4


def a_day(mean_s: float) -> Day:
    part = Part(n=10, attainment=1.0, mean_s=mean_s, p99_s=9.0, mean_threshold=0.9)
    note = PlanNote(at_s=1.0, verdict="change", reason="", rate=1.0, present={1: 4}, target={4: 1})
    return Day(
        slot_s=300.0,
        parts={"low": part, "loaded": part, "all": part},
        slots=[part],
        configurations=[Configuration(at_s=0.0, serving={1: 4}, n_taken=4)],
        plans=[note],
        n_lost=0,
        n_rebuilds=0,
        cpu_s=1.0,
    )


def test_latencies_are_compared_with_the_baselines() -> None:
    rows = _part_rows({"infaas": a_day(4.0), "dilaserve+plans": a_day(3.0)})
    ours = [row for row in rows if row.system == "dilaserve+plans"]
    assert {row.lower_than["infaas"] for row in ours} == {0.25}
    assert {row.n_changes for row in ours} == {1}


def test_names_lead_to_them_and_unknown_systems_are_refused(tmp_path: Path) -> None:
    assert load_experiment("fig8") is FIGURE_8
    assert load_experiment("table5") is TABLE_5
    assert "dilaserve+plans" in SYSTEMS
    with (
        session(tmp_path / "points", n_seeds=1, policies=("nobody+plans",)) as asked,
        pytest.raises(DiLaServeError, match=r"nobody\+plans"),
    ):
        TABLE_5.run(asked)
