"""Rates by class over a sliding window, and what the monitor does not know."""

from __future__ import annotations

import pytest

from dilaserve_reconfigurator.monitor import Missing, Monitor, Workload, coarsen

from .builders import request_class


def listen(monitor: Monitor, start_s: float, end_s: float) -> None:
    """A sign of life every second."""
    for second in range(int(start_s), int(end_s) + 1):
        monitor.alive(float(second))


def seen(monitor: Monitor, now: float) -> Workload:
    workload = monitor.workload(now)
    assert isinstance(workload, Workload), workload
    return workload


def test_rates_are_counts_over_observed_time() -> None:
    monitor = Monitor(window_s=300)
    for second in range(101):
        monitor.alive(float(second))
        monitor.arrived(float(second), f"a{second}", 200, 256, 10.0)
        if second % 4 == 0:
            monitor.arrived(float(second), f"b{second}", 700, 500, 10.0)
    workload = seen(monitor, 100.0)
    assert [(c.n_prompt, c.n_output) for c in workload.classes] == [(200, 256), (700, 500)]
    assert workload.classes[0].rate == pytest.approx(1.01)
    assert workload.classes[1].rate == pytest.approx(0.26)
    assert (workload.seen_s, workload.n_requests) == (100.0, 127)


def test_classes_are_bins_of_256_tokens_with_mean_lengths() -> None:
    monitor = Monitor()
    listen(monitor, 0, 60)
    for number, (n_prompt, n_output) in enumerate([(1, 1), (256, 256), (257, 256), (256, 257)]):
        monitor.arrived(60.0, f"r{number}", n_prompt, n_output, 5.0)
    sizes = {(c.n_prompt, c.n_output) for c in seen(monitor, 60.0).classes}
    assert sizes == {(129, 129), (257, 256), (256, 257)}


def test_slos_tell_classes_apart_and_the_tighter_counts() -> None:
    monitor = Monitor(slo_s=30.0)
    listen(monitor, 0, 60)
    for number, slo_s in enumerate([10.0, 10.5, 40.0, None]):
        monitor.arrived(60.0, f"r{number}", 100, 100, slo_s)
    assert sorted(c.slo_s for c in seen(monitor, 60.0).classes) == [10.0, 30.0, 40.0]


def test_what_is_older_than_the_window_is_forgotten() -> None:
    monitor = Monitor(window_s=60)
    listen(monitor, 0, 10)
    monitor.arrived(10.0, "old", 100, 100, 10.0)
    listen(monitor, 11, 69)
    assert seen(monitor, 69.0).n_requests == 1
    listen(monitor, 70, 72)
    workload = seen(monitor, 72.0)
    assert workload.classes == ()
    assert workload.seen_s == pytest.approx(60.0, abs=2.0)


def test_submission_that_is_sent_again_counts_once() -> None:
    monitor = Monitor()
    listen(monitor, 0, 60)
    for _ in range(3):
        monitor.arrived(60.0, "again", 100, 100, 10.0)
    assert seen(monitor, 60.0).n_requests == 1


def test_holds_before_anything_was_heard() -> None:
    missing = Monitor().workload(0.0)
    assert missing == Missing("nothing has been heard of the cluster lately")


def test_holds_until_enough_was_observed() -> None:
    monitor = Monitor(window_s=300, coverage=0.2)
    listen(monitor, 0, 59)
    assert monitor.workload(59.0) == Missing("only 59 s of the window were observed")
    listen(monitor, 60, 60)
    assert seen(monitor, 60.0).classes == (), "silence that was listened to is no load"


def test_holds_when_the_cluster_falls_silent() -> None:
    monitor = Monitor(gap_s=5)
    listen(monitor, 0, 100)
    assert isinstance(monitor.workload(104.0), Workload)
    assert isinstance(monitor.workload(106.0), Missing)


def test_time_without_signs_of_life_is_not_observed() -> None:
    """Twenty requests in 60 s heard, 100 s deaf: the rate is 20 in 60 s."""
    monitor = Monitor(window_s=300, gap_s=5)
    listen(monitor, 0, 30)
    listen(monitor, 130, 160)
    for number in range(20):
        monitor.arrived(160.0, f"r{number}", 100, 100, 10.0)
    workload = seen(monitor, 160.0)
    assert workload.seen_s == pytest.approx(60.0)
    assert workload.classes[0].rate == pytest.approx(20 / 60)


def test_coarser_classes_keep_the_work_and_the_tighter_slo() -> None:
    classes = (
        request_class(100, 100, slo_s=10.0, rate=5.0),
        request_class(110, 100, slo_s=8.0, rate=1.0),
        request_class(2000, 1000, slo_s=60.0, rate=2.0),
    )
    fewer = coarsen(classes, 2)
    assert fewer == (
        request_class(102, 100, slo_s=8.0, rate=6.0),
        request_class(2000, 1000, slo_s=60.0, rate=2.0),
    )
    assert set(coarsen(classes, 3)) == set(classes)
