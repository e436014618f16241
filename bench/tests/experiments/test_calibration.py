"""The calibration: its arithmetic, and a run that is too small to show anything."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dilaserve_bench.data import gsm8k_curves
from dilaserve_bench.experiments import calibration
from dilaserve_bench.experiments.calibration import as_lines, crossing, fit_overhead, solve
from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.gsm8k import Gsm8k


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


@pytest.fixture
def quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `--quick --json` prints, smaller still."""
    arguments = ["calibration", "--quick", "--json", "--seeds", "2", "--overhead", "1.6"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(calibration, "QUICK_REQUESTS", 25)
    calibration.main()
    return json.loads(capsys.readouterr().out)


def test_document_has_ours_beside_the_published(quick: Any) -> None:
    assert (quick["name"], quick["seeds"], quick["n"]) == ("calibration", [0, 1], 25)
    assert quick["is_quick"]
    assert quick["is_complete"]
    assert quick["found"]["overhead"] == 1.6
    points = [(row["policy"], row["rate"], row["slo_s"]) for row in quick["rows"]]
    assert points == [
        ("infaas", rate, slo_s)
        for rate, slo_s in [
            *((rate, 9.5) for rate in (1.5, 1.625, 1.687, 1.75, 1.875)),
            *((1.5, pytest.approx(slo_s)) for slo_s in (7.6, 5.7, 4.75, 3.8)),
        ]
    ]
    keys = {"attainment", "ci95", "mean_threshold", "accuracy", "p50_s", "p99_s"}
    assert all(keys <= row.keys() for row in quick["rows"])
    infaas = quick["published"]["systems"]["infaas"]
    assert infaas["attainment_by_rate"] == [1.0, 0.959, 0.754, 0.491, 0.343]
    lines = as_lines(msgspec.convert(quick, Document))
    assert lines[0].startswith("QUICK")
    assert len(lines) == 1 + 2 + 9 + 1
    assert "0.754" in "\n".join(lines)


def test_overhead_is_fitted_to_the_published_attainment() -> None:
    class Bench(Gsm8k):
        def __init__(self) -> None: ...

        def row(self, policy: str, rate: float, *, overhead: float, slo_s: float = 9.5) -> Row:
            assert (policy, rate, slo_s) == ("infaas", 1.687, 9.5)
            attainment = min(1.0, max(0.0, 1.0 - 2.0 * (overhead - 1.5)))
            return Row(
                policy=policy, rate=rate, slo_s=slo_s, attainment=attainment, ci95=None,
                mean_threshold=0.9, accuracy=None, p50_s=None, p99_s=None,
            )  # fmt: skip

    assert fit_overhead(Bench(), gsm8k_curves()) == pytest.approx(1.623, abs=0.003)
