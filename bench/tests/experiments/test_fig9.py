"""What deciding costs."""

from __future__ import annotations

from pathlib import Path

from dilaserve_bench.experiments.fig9 import FIGURE_9, POLICIES
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def test_quick_run(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1) as each:
        document = FIGURE_9.run(each)
    assert [row.policy for row in document.rows] == list(POLICIES)
    assert all(row.deciding_ms > 0 for row in document.rows)
    assert all(10 < row.pass_ms < 500 for row in document.rows)
    text = as_text(FIGURE_9.page(document), is_quick=True, is_complete=True)
    assert "3.4 %" in text
