"""One planner at a time, and one that was stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dilaserve_reconfigurator.alone import ASLEEP_S, AwakeClock, only_planner
from dilaserve_reconfigurator.snapshot import PlanningError

HOLD = """
import sys, time
from pathlib import Path
from dilaserve_reconfigurator.alone import only_planner
with only_planner(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_time_in_which_it_was_stopped_does_not_pass() -> None:
    times = iter([100.0, 100.5, 103.0, 4000.0, 4001.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock() for _ in range(4)] == [0.5, 3.0, 3.0 + ASLEEP_S, 4.0 + ASLEEP_S]


def test_another_planner_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    who = f"another planner, process {os.getpid()}, owns"
    with only_planner(folder), pytest.raises(PlanningError, match=who), only_planner(folder):
        pass
    with only_planner(folder):
        pass


def test_one_that_is_stopped_keeps_its_workers_until_it_is_killed(tmp_path: Path) -> None:
    frozen = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "held\n"
        frozen.send_signal(signal.SIGSTOP)
        who = f"process {frozen.pid}"
        with pytest.raises(PlanningError, match=who), only_planner(tmp_path):
            pass
    finally:
        frozen.kill()
        frozen.communicate()
    with only_planner(tmp_path):
        pass
