"""What is left out, and what is concluded; sizes and their loads; moves within a block."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments.ablation import ABLATION, CONTROL, FIGURE_11, without_each
from dilaserve_bench.experiments.fig13 import FIGURE_13, GSM8K, SIZES, Lengths
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.table6 import ANYTIME, TABLE_6
from dilaserve_scheduler.policies import PolicyOptions

from .helpers import session


def test_what_is_left_out_is_on_by_default() -> None:
    usual = PolicyOptions()
    without = without_each()
    assert without["without forecast"] == {"forecast": False}
    parts = {part for variant in {**CONTROL, **without}.values() for part in variant}
    assert all(getattr(usual, part) is True for part in parts)
    assert "all_candidates" not in parts  # that one is tried on a mix of degrees


def test_quick_ablation(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, rates=(1.8,)) as each:
        document = ABLATION.run(each)
    names = [row.policy for row in document.rows]
    assert names[:4] == ["neither", "SLO-aware", "load control", "both"]
    assert "without forecast" in names
    assert len(names) == len(set(names)) == len(CONTROL) + len(without_each()) + 2
    assert document.rows[0].mean_threshold == pytest.approx(0.9)  # neither: the highest threshold
    assert document.found["both_against_each"] == {"1.8": 0.0}
    text = as_text(ABLATION.page(document), is_quick=True, is_complete=True)
    assert "at: no rate" in text
    assert ABLATION.draw is not None
    ABLATION.draw(document)


def test_figure_11_is_beside_the_published(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, rates=(1.8,)) as each:
        document = FIGURE_11.run(each)
    assert document.published["attainment"]["both"] == [1.0, 0.998, 0.977, 0.727, 0.176]
    text = as_text(FIGURE_11.page(document), is_quick=True, is_complete=True)
    assert "0.727 / 0.71" in text


def test_sizes_are_loaded_alike() -> None:
    lengths = Lengths()
    assert lengths.rate(GSM8K, 1.875) == 1.875
    assert lengths.slo_s(GSM8K) == 9.5
    for size in SIZES:
        load = lengths.rate(size, 1.875) * lengths.work_s(size)
        assert load == pytest.approx(1.875 * lengths.work_s(GSM8K), rel=0.01)
    rates = {size.name: lengths.rate(size, 1.875) for size in SIZES}
    assert rates["output 1024"] < rates["8-shot"] < rates["5-shot"] < rates["2-shot"]
    assert rates["2-shot"] < rates["output 64"]


def test_quick_run_of_all_sizes(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, policies=("infaas",)) as each:
        document = FIGURE_13.run(each)
    assert [row.size for row in document.rows] == [size.name for size in SIZES]
    assert document.published["most_points_by_input"] == 81.0
    FIGURE_13.page(document)


def test_moves_within_a_block_are_rebuilt(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1) as each:
        document = TABLE_6.run(each)
    rows = {(row.policy, row.instances): row for row in document.rows}
    assert rows["llumnix", 4].moves > 0
    assert rows["llumnix", 4].rebuilds == 0
    assert rows[ANYTIME, 4].rebuilds > 0
    assert rows["infaas", 4].moves == 0
    assert rows[ANYTIME, 1].normalised == 1.0
    assert rows[ANYTIME, 1].moves == 0
    assert "1.38" in as_text(TABLE_6.page(document), is_quick=True, is_complete=True)
