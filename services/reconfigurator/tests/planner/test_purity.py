"""What plans does no I/O: neither ours nor, transitively, that of anything it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = ["snapshot", "monitor", "stage1", "stage2", "spare", "decision", "solving", "planner"]


@pytest.mark.parametrize("module", ["planner", "monitor"])
def test_planning_loads_no_io(module: str) -> None:
    """`planner` loads all the others but the monitor's users."""
    script = (
        f"import sys, dilaserve_reconfigurator.{module}\n"
        "print(*sorted({'asyncio', 'nats', 'redis', 'torch', 'httpx'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_planner_loads_both_stages() -> None:
    script = (
        "import sys, dilaserve_reconfigurator.planner\n"
        f"wanted = {{'dilaserve_reconfigurator.' + name for name in {PURE!r}}}\n"
        "print(*sorted(wanted - set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
