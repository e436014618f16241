"""Which core is whose, and how busy cores are."""

from __future__ import annotations

import os

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve_bench.live.cores import apart, parse_stat

STAT = """cpu  1000 0 500 8000 100 0 50 0 0 0
cpu0 600 10 300 4000 60 0 30 0 600 0
cpu1 400 0 200 4000 40 0 20 0 0 0
intr 12345
"""


def test_the_worker_has_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {3, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, wanted: cores.intersection_update(wanted)
    )
    with apart() as core:
        assert core == 3
        assert cores == {5}


def test_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(DiLaServeError, match="two cores"), apart():
        pass


def test_idle_and_waiting_cores_are_not_busy() -> None:
    assert parse_stat(STAT, {0}) == (940, 5000)
    assert parse_stat(STAT, {0, 1}) == (940 + 620, 5000 + 4660)
