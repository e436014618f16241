"""What is said of a stack that did not come up in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dilaserve.commands.background import _wait_ready
from dilaserve.errors import DiLaServeError

CHATTER = [f"valkey     │ line {number}" for number in range(30)]


def reason(home: Path, log_lines: list[str]) -> list[str]:
    """Lines of the error after a process that ended with this log."""
    log_path = home / "up.log"
    log_path.write_text("\n".join(log_lines))
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(DiLaServeError, match="did not come up") as error:
        _wait_ready(process, home, log_path)
    return str(error.value).splitlines()[1:]


def test_the_reason_comes_without_the_children_s_last_lines(tmp_path: Path) -> None:
    said = ["dilaserve: worker-1 does not start; it said:", "  no such device"]
    assert reason(tmp_path, [*CHATTER, *said]) == said


def test_a_log_without_a_reason_is_shown_from_its_end(tmp_path: Path) -> None:
    assert reason(tmp_path, CHATTER) == CHATTER[-20:]
