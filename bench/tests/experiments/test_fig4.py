"""TP degrees: the plumbing, and what has to come out of any profile."""

from __future__ import annotations

from pathlib import Path

from dilaserve_bench.experiments import fig4
from dilaserve_bench.experiments.fig4 import FIGURE_4
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def test_higher_degrees_are_faster_alone(tmp_path: Path) -> None:
    with session(tmp_path / "points", n_seeds=1) as asked:
        document = FIGURE_4.run(asked)
    lone = {(row.mode, row.instances): row for row in document.rows if row.part == "a"}
    assert len(lone) == len(fig4.MODES) * len(fig4.DEGREES)
    for mode in fig4.MODES:
        shares = [lone[mode, f"1xtp{degree}"].relative or 0.0 for degree in fig4.DEGREES]
        assert shares[0] == 1.0
        assert shares == sorted(shares, reverse=True)
    assert lone["no_cache", "1xtp4"].published_relative == 0.451
    assert lone["cache32", "1xtp1"].mean_s < lone["no_cache", "1xtp1"].mean_s
    loaded = [row for row in document.rows if row.part == "b"]
    assert {row.published_s for row in loaded if row.rate == 1.5} == {11.371, 3.39}
    text = as_text(FIGURE_4.page(document), is_quick=True, is_complete=True)
    assert "8xtp1, published" in text
    assert FIGURE_4.draw is not None
    assert len(FIGURE_4.draw(document).axes) == 2
