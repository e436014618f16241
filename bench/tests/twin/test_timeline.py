"""Virtual time."""

from __future__ import annotations

import pytest

from dilaserve_bench.twin.timeline import Timeline


def test_things_happen_in_order_of_time_and_then_of_planning() -> None:
    timeline, seen = Timeline(), []
    for name, time_s in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        timeline.at(time_s, lambda name: seen.append((timeline.now, name)), name)
    timeline.run(horizon_s=9.0, interrupted=lambda: False)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert timeline.n_events == 4


def test_what_happens_may_plan_more() -> None:
    timeline, seen = Timeline(), []

    def beat(_: object) -> None:
        seen.append(timeline.now)
        timeline.after(0.5, beat)

    timeline.after(0.5, beat)
    timeline.run(horizon_s=2.0, interrupted=lambda: False)
    assert seen == [0.5, 1.0, 1.5, 2.0]


def test_it_stops_when_it_is_told() -> None:
    timeline, seen = Timeline(), []
    for time_s in (1.0, 2.0, 3.0):
        timeline.at(time_s, seen.append, time_s)
    timeline.at(2.0, lambda _: timeline.stop())
    timeline.run(horizon_s=9.0, interrupted=lambda: False)
    assert (seen, timeline.now) == ([1.0, 2.0], 2.0)


def test_it_breaks_off_before_long() -> None:
    timeline = Timeline()

    def beat(_: object) -> None:
        timeline.after(1.0, beat)

    timeline.after(1.0, beat)
    timeline.run(horizon_s=1e9, interrupted=lambda: timeline.now > 5000)
    assert 5000 < timeline.now < 10_000


def test_the_past_is_past() -> None:
    timeline = Timeline()
    timeline.at(1.0, lambda _: timeline.at(0.5, lambda _: None))
    with pytest.raises(ValueError, match="before now"):
        timeline.run(horizon_s=9.0, interrupted=lambda: False)
