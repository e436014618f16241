"""What `dilaserve generate` says of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from dilaserve.commands.generate import summary

REPORT: dict[str, Any] = {
    "slo_ms": None,
    "slo_met": None,
    "latency_ms": 123.4,
    "mean_threshold": 0.75,
    "n_steps": 6,
    "steps": {"recompute": 1, "cache": 5, "rebuild": 0},
    "migrations": 0,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "6 steps (1 recompute, 5 cache), 123 ms, mean threshold 0.75"),
        (
            {"slo_ms": 100, "slo_met": False, "migrations": 2},
            "6 steps (1 recompute, 5 cache), 2 migrations, 123 ms, mean threshold 0.75, "
            "SLO of 100 ms missed",
        ),
        (
            {"slo_ms": 200, "slo_met": True, "latency_ms": None},
            "6 steps (1 recompute, 5 cache), mean threshold 0.75, SLO of 200 ms met",
        ),
        ({"steps": {"recompute": 0}, "mean_threshold": None}, "no step, 123 ms"),
    ],
)
def test_one_line(changes: dict[str, Any], line: str) -> None:
    assert summary(REPORT | changes) == line
