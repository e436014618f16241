"""What a threshold costs: mixtures, and a run that is too small to show anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments.fig3 import FIGURE_3, SHARES, THRESHOLDS, mixed_threshold
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def test_a_mixture_has_its_share() -> None:
    drawn = [mixed_threshold(0.3, case, step) for case in range(20) for step in range(50)]
    assert drawn.count(0.9) == pytest.approx(300, abs=50)
    assert set(drawn) == {0.6, 0.9}
    assert mixed_threshold(0.3, 4, 7) == mixed_threshold(0.3, 4, 7)


def test_quick_run(tmp_path: Path) -> None:
    with session(tmp_path / "points") as each:
        document = FIGURE_3.run(each)
    fixed = [row for row in document.rows if row.variant == "fixed"]
    mixed = [row for row in document.rows if row.variant == "mixed"]
    assert [row.threshold for row in fixed] == list(THRESHOLDS)
    assert [row.share_of_high for row in mixed] == list(SHARES)
    # Mixtures that are none are the fixed thresholds.
    assert mixed[-1].mean_steps == fixed[0].mean_steps
    assert mixed[0].mean_steps == fixed[THRESHOLDS.index(0.6)].mean_steps
    assert mixed[0].mean_steps < mixed[-1].mean_steps
    text = as_text(FIGURE_3.page(document), is_quick=True, is_complete=True)
    assert "12 problems" in text
    assert FIGURE_3.draw is not None
    FIGURE_3.draw(document)
