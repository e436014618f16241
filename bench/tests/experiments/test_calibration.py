"""The calibration: its arithmetic, and a run that is too small to show anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_bench.experiments.calibration import EXPERIMENT, FIGURE_10
from dilaserve_bench.experiments.document import Row
from dilaserve_bench.experiments.fitting import crossing, fit_overhead, solve
from dilaserve_bench.experiments.gsm8k import Gsm8k, Point
from dilaserve_bench.experiments.page import as_text

from .helpers import session


def test_the_zero_of_a_falling_function_is_found_in_few_steps() -> None:
    asked: list[float] = []

    def f(x: float) -> float:
        asked.append(x)
        return min(0.246, 6.0 * (1.63 - x))  # flat at first, like an attainment

    x = solve(f, 1.0, 2.5, tolerance=0.004)
    assert x == pytest.approx(1.63, abs=0.001)
    assert len(asked) < 15


def test_a_zero_on_the_border_is_one() -> None:
    assert solve(lambda x: 1.0 - x, 1.0, 2.0, tolerance=1e-6) == pytest.approx(1.0)


def test_without_a_change_of_sign_there_is_no_zero() -> None:
    with pytest.raises(ValueError, match="no zero"):
        solve(lambda x: 1.0, 1.0, 2.5, tolerance=0.1)


def test_a_zero_beyond_the_bracket_is_found() -> None:
    assert solve(lambda x: 7.0 - x, 1.0, 2.5, tolerance=1e-6) == pytest.approx(7.0)


def test_an_interrupted_search_finds_nothing() -> None:
    values = iter([1.0, -1.0, None])
    assert solve(lambda x: next(values), 1.0, 2.5, tolerance=0.1) is None


def test_a_curve_is_crossed_between_its_points() -> None:
    assert crossing([(1.0, 1.0), (1.5, 0.8), (2.0, 0.6)], 0.75) == pytest.approx(1.625)
    assert crossing([(1.0, 1.0), (2.0, 0.8)], 0.75) is None


def test_document_has_ours_beside_the_published(tmp_path: Path) -> None:
    with session(tmp_path / "points", overhead=1.6, policies=("infaas",)) as each:
        document = EXPERIMENT.run(each)
    assert document.found["overhead"] == 1.6
    assert not document.found["is_fitted"]
    points = [(row.policy, row.rate, row.slo_s) for row in document.rows]
    assert points == [
        ("infaas", rate, slo_s)
        for rate, slo_s in [
            *((rate, 9.5) for rate in (1.5, 1.625, 1.687, 1.75, 1.875)),
            *((1.5, pytest.approx(slo_s)) for slo_s in (7.6, 5.7, 4.75, 3.8)),
        ]
    ]
    infaas = document.published["systems"]["infaas"]
    assert infaas["attainment_by_rate"] == [1.0, 0.959, 0.754, 0.491, 0.343]
    text = as_text(EXPERIMENT.page(document), is_quick=True, is_complete=True)
    assert "0.754" in text
    assert EXPERIMENT.draw is not None
    EXPERIMENT.draw(document)


def test_figure_10_has_ours_too(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1) as each:
        document = FIGURE_10.run(each)
    assert {row.policy for row in document.rows} == {
        "infaas", "llumnix", "tediserve", "dilaserve",
    }  # fmt: skip
    assert {row.overhead for row in document.rows} == {1.595}


def test_a_quick_one_is_fitted_too(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, policies=("infaas",)) as each:
        document = EXPERIMENT.run(each)
    assert document.found["overhead"] > 1.0
    assert document.found["is_fitted"]


def test_a_fixed_threshold_is_infaas_at_another(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1) as each:
        bench = Gsm8k(each)
        same = bench.row(Point(policy="fixed-0.9", rate=1.5, overhead=1.5))
        infaas = bench.row(Point(policy="infaas", rate=1.5, overhead=1.5))
        lower = bench.row(Point(policy="fixed-0.6", rate=1.5, overhead=1.5))
    assert same is not None
    assert infaas is not None
    assert lower is not None
    assert (same.policy, same.p50_s) == ("fixed-0.9", infaas.p50_s)
    assert (lower.mean_threshold, same.mean_threshold) == (pytest.approx(0.6), pytest.approx(0.9))
    assert len((tmp_path / "points").read_text().splitlines()) == 2  # 0.9 was measured once


def test_overhead_is_fitted_to_the_published_attainment() -> None:
    class Bench(Gsm8k):
        def __init__(self) -> None: ...

        def row(self, point: Point, name: str | None = None) -> Row:
            assert (point.policy, point.rate, point.slo_s) == ("infaas", 1.687, 9.5)
            attainment = min(1.0, max(0.0, 1.0 - 2.0 * (point.overhead - 1.5)))
            return Row(
                policy="infaas", rate=1.687, slo_s=9.5, overhead=point.overhead,
                attainment=attainment, ci95=None, mean_threshold=0.9, p50_s=None, p99_s=None,
            )  # fmt: skip

    assert fit_overhead(Bench()) == pytest.approx(1.623, abs=0.003)
