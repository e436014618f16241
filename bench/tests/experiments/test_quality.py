"""Answers checked: the paired arithmetic, and the plumbing on a dozen problems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilaserve_bench.experiments import quality
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.paired import mean_of, paired, paired_excess
from dilaserve_bench.experiments.quality import EXPERIMENT, QualityRun, rows_of

from .helpers import session

MODEL = Path(__file__).parents[3] / "models" / "tiny"


def kept(right: str) -> QualityRun:
    return QualityRun(
        attainment=1.0, mean_threshold=0.9, p50_s=1.0, p99_s=2.0, right=right, cpu_s=0.0
    )


def test_the_interval_is_of_the_mean() -> None:
    half = mean_of([0.0, 1.0] * 50)
    assert half.mean == 0.5
    assert half.ci95 == pytest.approx(1.96 * 0.5 / 10, rel=0.01)


def test_problems_that_both_answer_alike_do_not_count() -> None:
    both = [True, False] * 500
    assert paired(both, both).ci95 == 0.0
    lost = paired([True] * 100 + both, [False] * 100 + both)
    assert lost.mean == pytest.approx(100 / 1100)
    assert lost.ci95 < mean_of([float(each) for each in both]).ci95


def test_half_of_a_loss_is_no_excess() -> None:
    best, worst = [True] * 100, [True] * 80 + [False] * 20
    ours = [True] * 90 + [False] * 10
    assert paired_excess(best, ours, worst, share=0.5).mean == pytest.approx(0.0)
    assert paired_excess(best, worst, worst, share=0.5).mean == pytest.approx(0.1)


def test_every_policy_is_compared_on_the_same_problems() -> None:
    runs = {
        "infaas": kept("1" * 100),
        "fixed-0.7": kept("0" * 20 + "1" * 80),
        "dilaserve": kept("1" * 96 + "0" * 4),
    }
    rows = {row.policy: row for row in rows_of(4.0, runs)}
    assert rows["dilaserve"].lost == pytest.approx(0.04)
    assert rows["dilaserve"].beyond_half == pytest.approx(0.04 - 0.1)
    assert rows["infaas"].lost == 0.0


def test_without_the_fixed_thresholds_there_is_nothing_to_compare_with() -> None:
    (row,) = rows_of(4.0, {"dilaserve": kept("10")})
    assert (row.lost, row.beyond_half) == (None, None)


def test_a_run_denoises_and_checks_every_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "QUICK_PER_TASK", 2)
    monkeypatch.setenv("DILASERVE_MODEL", str(MODEL))
    with session(tmp_path / "points", policies=("infaas", "fixed-0.5")) as asked:
        asked.environ = dict(os.environ)
        document = EXPERIMENT.run(asked)
    best, worst = document.rows
    assert document.n == 12
    assert (best.mean_threshold, worst.mean_threshold) == (pytest.approx(0.9), pytest.approx(0.5))
    assert best.accuracy > 0.8
    assert best.p50_s is not None
    assert "12 problems" in as_text(
        EXPERIMENT.page(document), is_quick=True, is_complete=document.is_complete
    )
