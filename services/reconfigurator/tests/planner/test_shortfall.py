"""What a mix lacks, on instances that can be checked by hand (see test_stage1)."""

from __future__ import annotations

from collections.abc import Mapping

from dilaserve_reconfigurator import shortfall
from dilaserve_reconfigurator.snapshot import Snapshot
from dilaserve_reconfigurator.solving import Outcome, solve

from .builders import EXACT, request_class, snapshot, speed

FLAT = speed(1, {64: 0.1})
FAST = speed(2, {64: 0.05}, {32: 0.05})
NONE: frozenset[int] = frozenset()


def solved(given: Snapshot, counts: Mapping[int, int]) -> tuple[Outcome, str]:
    model = shortfall.build_model(given, counts, NONE)
    outcome = solve(model, 30.0, gap=EXACT)
    return outcome, shortfall.lacking(model) if outcome.has_solution else ""


def test_instances_that_are_missing() -> None:
    """A request takes 0.4 s at the lowest threshold: ten a second are four instances' work."""
    _, text = solved(snapshot([request_class(rate=10.0)], [FLAT]), {1: 1})
    assert text == (
        "it lacks 3.0 instances of TP-1 (work for 4.0, 1 there), even at the lowest thresholds, "
        "for 1 times the rates; add GPUs, or allow longer SLOs"
    )


def test_only_degrees_that_are_there_may_have_more() -> None:
    """TP-2 is no faster here: its GPUs would be wasted, were there a choice."""
    given = snapshot([request_class(rate=10.0)], [FLAT, speed(2, {64: 0.1})], nodes=(3,))
    _, text = solved(given, {1: 1, 2: 1})
    assert text.startswith("it lacks 2.0 instances of TP-1 (work for 3.0, 1 there), even")
    _, text = solved(given, {1: 0, 2: 1})
    assert text.startswith("it lacks 3.0 instances of TP-2 (work for 4.0, 1 there), even")


def test_hardly_anything_is_missing() -> None:
    _, text = solved(snapshot([request_class(rate=2.6)], [FLAT]), {1: 1})
    assert text.startswith("it lacks less than a tenth of an instance, even")


def test_a_class_that_is_too_slow_on_its_degrees_is_named() -> None:
    given = snapshot([request_class(slo_s=0.3), request_class()], [FLAT, FAST], nodes=(3,))
    outcome, _ = solved(given, {1: 3})
    assert outcome.status == "infeasible"
    assert shortfall.too_late(given, {1: 3, 2: 0}, NONE) == (
        "TP-1 is too slow for 32 + 32 tokens within 0.3 s, however many there are; allow a longer "
        "SLO"
    )
    assert "no size of their batches" in shortfall.too_late(given, {1: 0, 2: 1}, NONE)
