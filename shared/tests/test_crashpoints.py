"""A crash point kills its process where and when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import get_args

import pytest

from dilaserve.crashpoints import CrashPoint, CrashPoints
from dilaserve.errors import SettingsError

SCRIPT = """
import sys
from dilaserve.crashpoints import CrashPoints
points = CrashPoints(sys.argv[1])
for i in range(5):
    points.reach("worker.before_forward")
    points.reach("worker.after_commit")
    print(i, flush=True)
"""


@pytest.mark.parametrize(
    ("armed", "printed", "code"),
    [
        ("worker.after_commit:3", "0 1", -signal.SIGKILL),
        ("worker.after_commit", "", -signal.SIGKILL),
        ("worker.after_commit:6", "0 1 2 3 4", 0),
        ("scheduler.after_admit:1", "0 1 2 3 4", 0),
        ("", "0 1 2 3 4", 0),
    ],
)
def test_dies_at_the_nth_time_and_only_there(armed: str, printed: str, code: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, armed], capture_output=True, text=True, check=False
    )
    assert (result.stdout.split(), result.returncode) == (printed.split(), code)
    assert result.stderr == ""


@pytest.mark.parametrize(
    "armed", ["worker", "worker.after_commit:0", "worker.after_commit:x", ":3"]
)
def test_refuses_what_it_does_not_know(armed: str) -> None:
    with pytest.raises(SettingsError, match=f"DILASERVE_CRASH_AT='{armed}'.*after_commit:3"):
        CrashPoints(armed)


def test_every_point_can_be_armed() -> None:
    for point in get_args(CrashPoint):
        CrashPoints(f"{point}:2").reach(point)
