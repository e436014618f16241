"""What became of requests, as it is overheard."""

from __future__ import annotations

import pytest

from dilaserve.messages import (
    CommitOutcome,
    ConfidenceStats,
    FinishReason,
    StepItemResult,
    StepResult,
)
from dilaserve_reconfigurator import outcomes as module
from dilaserve_reconfigurator.outcomes import Observed, Outcomes

STATS = ConfidenceStats(min=0.1, q25=0.3, median=0.5, mean=0.5, q75=0.8)


def step(
    request_id: str,
    number: int,
    threshold: float,
    *,
    finish: FinishReason | None = None,
    outcome: CommitOutcome = "committed",
) -> StepResult:
    item = StepItemResult(
        request_id=request_id,
        epoch=1,
        step=number,
        block=0,
        kind="cache",
        threshold=threshold,
        outcome=outcome,
        n_new=1,
        n_unmasked=number,
        n_block_masked=0,
        confidence=STATS,
        finish_reason=finish,
    )
    return StepResult(instance_id="a-0001", batch=number, latency_ms=1.0, n_tokens=1, items=[item])


def test_attainment_latency_threshold_and_load() -> None:
    ours = Outcomes(slo_s=30.0)
    ours.submitted(0.0, "before", None)
    ours.submitted(10.0, "quick", 5.0)
    ours.submitted(10.0, "slow", 5.0)
    ours.submitted(10.0, "refused", 5.0)
    ours.submitted(18.0, "running", 30.0)
    ours.stepped(11.0, step("quick", 1, 0.9))
    ours.stepped(12.0, step("quick", 2, 0.7, finish="length"))
    ours.stepped(12.0, step("quick", 2, 0.1, finish="length", outcome="duplicate"))
    ours.stepped(18.0, step("slow", 1, 0.6, finish="length"))
    ours.stepped(18.0, step("unknown", 1, 0.6, finish="length"))
    seen = ours.observed(10.0, 20.0)
    assert (seen.seconds, seen.rate, seen.n_judged) == (10.0, 0.4, 3)
    assert seen.attainment == pytest.approx(1 / 3)
    assert seen.mean_latency_s == pytest.approx((2.0 + 8.0) / 2)
    assert seen.mean_threshold == pytest.approx((0.8 + 0.6) / 2)


def test_one_that_is_submitted_again_counts_once_and_from_the_first_time() -> None:
    ours = Outcomes(slo_s=30.0)
    ours.submitted(1.0, "r", None)
    ours.submitted(4.0, "r", None)
    ours.stepped(5.0, step("r", 1, 0.9, finish="length"))
    assert ours.observed(0.0, 10.0).mean_latency_s == 4.0


def test_one_that_was_cancelled_says_nothing() -> None:
    ours = Outcomes(slo_s=1.0)
    ours.submitted(1.0, "r", None)
    ours.cancelled("r")
    ours.cancelled("unknown")
    assert ours.observed(0.0, 10.0) == Observed(seconds=10.0, rate=0.0, n_judged=0)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "N_REMEMBERED", 2)
    ours = Outcomes(slo_s=1.0)
    for number in range(3):
        ours.submitted(float(number), f"r{number}", None)
    assert ours.observed(0.0, 3.0).rate == pytest.approx(2 / 3)
