"""The stack's state file and its lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dilaserve.addresses import find_addresses
from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.state import (
    ChildState,
    StackState,
    locked,
    refuse_second,
    remove_state,
    running_state,
    write_state,
)

STATE = StackState(
    phase="ready",
    supervisor_pid=1,
    gateway_url="http://127.0.0.1:8123",
    nats_url="nats://127.0.0.1:1",
    redis_url="redis://127.0.0.1:2/0",
    model="m",
    children=[
        ChildState(name="nats", service="nats", phase="ready", pid=2, n_restarts=0),
    ],
)


def test_state_is_found_while_its_supervisor_lives(tmp_path: Path) -> None:
    with locked(tmp_path):
        write_state(tmp_path, STATE)
        assert running_state(tmp_path) == STATE
    assert running_state(tmp_path) is None


def test_no_state_where_none_was(tmp_path: Path) -> None:
    assert running_state(tmp_path / "nowhere") is None


def test_second_supervisor_is_refused_with_the_address_of_the_first(tmp_path: Path) -> None:
    with locked(tmp_path):
        write_state(tmp_path, STATE)
        with pytest.raises(DiLaServeError, match=r"pid 1, http://127.0.0.1:8123"), locked(tmp_path):
            pytest.fail("two supervisors")
        assert running_state(tmp_path) == STATE


def test_second_start_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    refuse_second(tmp_path)
    with locked(tmp_path):
        write_state(tmp_path, STATE)
        with pytest.raises(DiLaServeError, match=r"already runs .*pid 1, http://127.0.0.1:8123"):
            refuse_second(tmp_path)
    refuse_second(tmp_path)


def test_state_of_a_killed_supervisor_is_stale(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from dilaserve.supervisor.state import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    write_state(tmp_path, STATE)
    assert running_state(tmp_path) is None
    with locked(tmp_path):
        assert running_state(tmp_path) is None, "a new supervisor inherits nothing"


def test_unreadable_state_names_the_file(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / "stack.json").write_text('{"phase": "nonsense"}')
        with pytest.raises(DiLaServeError, match=r"stack\.json was written by another version"):
            running_state(tmp_path)
        remove_state(tmp_path)


def test_addresses_by_variable_then_stack_then_usual(tmp_path: Path) -> None:
    environ = {"DILASERVE_HOME": str(tmp_path)}
    assert find_addresses(environ).gateway_url == "http://127.0.0.1:8000"
    with locked(tmp_path):
        write_state(tmp_path, STATE)
        found = find_addresses({**environ, "DILASERVE_NATS_URL": "nats://other:4222"})
    assert found.gateway_url == "http://127.0.0.1:8123"
    assert found.nats_url == "nats://other:4222"
    assert found.redis_url == "redis://127.0.0.1:2/0"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / "home"
    assert running_state(home) is None
    with pytest.raises(DiLaServeError, match=r"file/home cannot be used: .*DILASERVE_HOME"):
        locked(home).__enter__()
