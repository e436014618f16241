"""What the predictor is worth: the plumbing, and what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.predictor import EXPERIMENT

from .helpers import session


@pytest.mark.timeout(300)
def test_quick_run(tmp_path: Path) -> None:
    with session(tmp_path / "points", n_seeds=1) as each:
        document = EXPERIMENT.run(each)
    with session(tmp_path / "points", n_seeds=1) as again:
        assert EXPERIMENT.run(again) == document, "kept, and not measured again"
    assert [row.variant for row in document.rows] == ["one_shot", "progress", "full"]
    wmape = {row.variant: row.wmape for row in document.rows}
    assert wmape["full"] < wmape["one_shot"]
    found = document.found
    assert found["runs"] == 12 * 8
    assert 0 < found["switching_runs"] <= 12 * 3
    assert found["latency"]["p50_ms"] > 0
    assert [row["variant"] for row in found["served"]] == ["one_shot", "progress", "full"]
    text = as_text(EXPERIMENT.page(document), is_quick=True, is_complete=True)
    assert "full / progress: " in text
    assert "64 requests under 5 candidates" in text
    assert EXPERIMENT.draw is not None
    EXPERIMENT.draw(document)
