"""A plan in words, with what came of it beside what was predicted."""

from __future__ import annotations

import msgspec

from dilaserve_reconfigurator.explain import explain
from dilaserve_reconfigurator.outcomes import Observed
from dilaserve_reconfigurator.record import CarriedOut, Mix, PlanRecord

RECORD = PlanRecord(
    plan_id="plan-1",
    made_at_s=0.0,
    verdict="change",
    reasons=["because"],
    present=Mix(counts={1: 4}, mean_threshold=0.7, mean_slack=0.5, mean_latency_s=3.0),
    target=Mix(counts={4: 1}, mean_threshold=0.8, mean_slack=0.6, mean_latency_s=2.0),
)
BEFORE = Observed(
    seconds=300.0, rate=2.0, n_judged=590, attainment=0.9, mean_latency_s=3.1, mean_threshold=0.71
)


def test_a_pause_is_named() -> None:
    carried = CarriedOut(phase="done", seconds=40.0, lowest=0, floor=2, pause_s=12.5)
    lines = explain(msgspec.structs.replace(RECORD, carried_out=carried)).splitlines()
    assert "carried  done in 40 s" in lines
    [pause] = [line for line in lines if line.startswith("pause")]
    assert "12.5 s with less than 2 GPUs serving (at least 0)" in pause


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    after = Observed(seconds=300.0, rate=2.5, n_judged=0)
    carried = CarriedOut(phase="done", seconds=40.0, lowest=4, floor=4)
    record = msgspec.structs.replace(RECORD, carried_out=carried, before=BEFORE, after=after)
    text = explain(record)
    assert "target   1×TP-4: mean threshold 0.800" in text
    assert "serving  at least 4 GPUs all the time" in text
    assert (
        "before   2 requests a second for 300 s, 90.0% of 590 in time: mean threshold 0.710, "
        "latency 3.10 s" in text
    )
    assert "after    2.5 requests a second for 300 s, none of which ended" in text


def test_one_that_was_given_up_says_why() -> None:
    carried = CarriedOut(phase="given_up", reason="no such image")
    text = explain(msgspec.structs.replace(RECORD, carried_out=carried))
    assert "carried  given up in 0 s: no such image" in text
