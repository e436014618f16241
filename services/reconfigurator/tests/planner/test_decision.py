"""Ten per cent, for better numbers of either sign; and not back at once."""

from __future__ import annotations

import pytest

from dilaserve_reconfigurator.decision import Change, Costs, decide, gain
from dilaserve_reconfigurator.record import Mix

ONES, FOURS = {1: 16, 4: 0}, {1: 0, 4: 4}


def mix(counts: dict[int, int], threshold: float | None = 0.9, slack: float = 0.5) -> Mix:
    if threshold is None:
        return Mix(counts=counts)
    return Mix(counts=counts, mean_threshold=threshold, mean_slack=slack, mean_latency_s=1.0)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (1.1, 1.0, 0.1),
        (0.9, 1.0, -0.1),
        (-1.8, -2.0, 0.1),
        (-2.2, -2.0, -0.1),
        (1.0, -1.0, 2.0),
        (-1.0, 1.0, -2.0),
        (0.0, 0.0, 0.0),
        (0.1, 0.0, float("inf")),
        (-0.1, 0.0, float("-inf")),
    ],
)
def test_gain_has_the_sign_of_what_is_better(new: float, old: float, expected: float) -> None:
    assert gain(new, old) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("present", "best", "verdict"),
    [
        ((0.80, 0.5), (0.89, 0.5), "change"),
        ((0.80, 0.5), (0.87, 0.5), "keep"),
        ((0.90, 0.5), (0.80, 0.9), "keep"),  # much sooner, at a lower threshold
        ((0.90, 0.50), (0.90, 0.56), "change"),  # 44 % of the SLO instead of 50 %
        ((0.90, 0.50), (0.90, 0.54), "keep"),
        ((0.90, 0.50), (0.895, 0.56), "change"),  # the same threshold within the gap
        ((0.80, 0.20), (0.85, 0.60), "change"),  # a little higher, and much sooner
        ((0.50, -1.0), (0.50, -0.5), "change"),  # 150 % of the SLO instead of 200 %
        ((0.50, -1.0), (0.50, -1.5), "keep"),
        ((0.50, -1.0), (0.50, -0.9), "keep"),
        ((0.50, -0.1), (0.50, 0.1), "change"),
    ],
)
def test_change_has_to_bring_a_tenth(
    present: tuple[float, float], best: tuple[float, float], verdict: str
) -> None:
    judgement = decide(0.0, mix(ONES, *present), mix(FOURS, *best), Costs())
    assert judgement.verdict == verdict, judgement.reasons
    assert judgement.reasons


def test_what_is_no_better_is_no_change_however_little_is_asked_for() -> None:
    costs = Costs(min_gain=0.0)
    assert decide(0.0, mix(ONES), mix(FOURS), costs).verdict == "keep"
    assert decide(0.0, mix(ONES), mix(FOURS, slack=0.501), costs).verdict == "change"


def test_nothing_to_change() -> None:
    judgement = decide(0.0, mix(ONES), mix(ONES, slack=0.99), Costs())
    assert judgement.verdict == "keep"
    assert judgement.reasons == ["16×TP-1 is the best there is"]


def test_what_is_kept_though_nothing_serves_the_load_is_not_praised() -> None:
    judgement = decide(0.0, mix(ONES, None), mix(ONES, None), Costs())
    assert judgement.verdict == "keep"
    assert judgement.reasons == [
        "no mix can serve this load within its SLOs; 16×TP-1 is kept, which serves the most"
    ]


def test_mix_that_cannot_serve_the_load_is_left_at_once() -> None:
    last = Change(at_s=0.0, before=ONES, payback_s=1e9)
    judgement = decide(1.0, mix(FOURS, None), mix(ONES, 0.5, 0.0), Costs(), last)
    assert judgement.verdict == "change", "although it undoes the last change"
    assert judgement.reasons == ["4×TP-4 cannot serve this load within its SLOs; 16×TP-1 can"]


def test_overload_goes_to_the_mix_that_serves_the_most() -> None:
    judgement = decide(0.0, mix(FOURS, None), mix(ONES, None), Costs())
    assert judgement.verdict == "change"
    assert "nor can any other mix: 16×TP-1 serves the most" in judgement.reasons[0]


def test_payback_is_lost_gpu_time_over_gained_time() -> None:
    """Four instances of four GPUs take 60 s each, of 16 GPUs in all: 60 s of the cluster. A gain
    of 20 % pays that back in 300 s."""
    judgement = decide(0.0, mix(ONES, slack=0.5), mix(FOURS, slack=0.6), Costs(launch_s=60.0))
    assert judgement.payback_s == pytest.approx(300.0)


@pytest.mark.parametrize(("now", "verdict"), [(299.0, "keep"), (301.0, "change")])
def test_change_is_not_undone_before_it_has_paid_back(now: float, verdict: str) -> None:
    last = Change(at_s=0.0, before=ONES, payback_s=300.0)
    back = decide(now, mix(FOURS, slack=0.2), mix(ONES, slack=0.5), Costs(), last)
    assert back.verdict == verdict
    assert (verdict == "change") or "another 1 s to pay back" in back.reasons[1]


def test_change_may_go_on_in_the_same_direction() -> None:
    last = Change(at_s=0.0, before=ONES, payback_s=300.0)
    half, full = {1: 8, 4: 2}, FOURS
    further = decide(1.0, mix(half, slack=0.2), mix(full, slack=0.5), Costs(), last)
    assert further.verdict == "change"
