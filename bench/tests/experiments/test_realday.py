"""The real day: its plumbing, on days of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.data import published_days
from dilaserve_bench.experiments import realday
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.two_hours import LOOKS_PER_SLOT

from .helpers import session


@pytest.fixture
def short_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realday, "QUICK_SLOT_S", 0.5)


@pytest.mark.usefixtures("short_day")
def test_a_row_for_each_part_of_the_day_and_policy(tmp_path: Path) -> None:
    with session(tmp_path / "points", policies=("infaas", "dilaserve")) as asked:
        document = realday.EXPERIMENT.run(asked)
    rows = {(row.policy, row.period): row for row in document.rows}
    assert len(rows) == 6
    low, loaded, whole = (rows["infaas", part] for part in ("low", "loaded", "all"))
    assert low.n + loaded.n == whole.n == document.n
    assert loaded.rate > low.rate
    assert loaded.mean_threshold == 0.9
    assert len(document.found["minutes"]["infaas"]["n"]) <= 24 * LOOKS_PER_SLOT
    assert "peak" in as_text(
        realday.EXPERIMENT.page(document), is_quick=True, is_complete=document.is_complete
    )
    assert realday.draw(document).axes


def test_the_published_days_are_whole() -> None:
    published = published_days()
    assert {len(day.attainment) for day in published.systems.values()} == {41}
    assert published.systems["infaas"].loaded == 0.6816
