"""A server as a child process: started, awaited, killed, started again on the same port."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dilaserve.embedded.commands import DEFAULT_MAX_MEMORY, LOOPBACK, nats_argv, valkey_argv
from dilaserve.embedded.ports import free_port
from dilaserve.errors import DiLaServeError

Probe = Callable[[int], Awaitable[bool]]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.01
_PROBE_TIMEOUT_S = 1.0


@asynccontextmanager
async def start_nats(*, port: int = 0) -> AsyncIterator[EmbeddedServer]:
    """A NATS server on loopback (port 0 takes a free one), stopped at the end.
    Raises DiLaServeError when there is no binary or it does not come up."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="dilaserve-nats-") as directory:
        server = EmbeddedServer(
            name="nats",
            url=f"nats://{LOOPBACK}:{port}",
            port=port,
            argv=nats_argv(port),
            answers=nats_answers,
            log_path=Path(directory, "nats.log"),
        )
        async with _running(server):
            yield server


@asynccontextmanager
async def start_valkey(
    *,
    port: int = 0,
    directory: Path | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    n_databases: int = 16,
) -> AsyncIterator[EmbeddedServer]:
    """A Valkey server on loopback (port 0 takes a free one), stopped at the end. Its append-only
    file lives in `directory`, by default a temporary one.
    Raises DiLaServeError when there is no binary or it does not come up."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="dilaserve-valkey-") as temporary:
        directory = directory or Path(temporary)
        server = EmbeddedServer(
            name="valkey",
            url=f"redis://{LOOPBACK}:{port}/0",
            port=port,
            argv=valkey_argv(port, directory, max_memory=max_memory, n_databases=n_databases),
            answers=valkey_answers,
            log_path=directory / "valkey.log",
        )
        async with _running(server):
            yield server


@dataclass(slots=True)
class EmbeddedServer:
    """One server process, belonging to no event loop. `kill` and `start` simulate a crash and a
    restart: port and files stay the same."""

    name: str
    url: str
    port: int
    argv: list[str]
    answers: Probe
    log_path: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Process id of the running server; 0 when it does not run."""
        return self._process.pid if self._process else 0

    async def start(self, *, timeout_s: float = 15.0) -> None:
        """Start and wait until it answers. Raises DiLaServeError with the end of its log."""
        if await self.answers(self.port):
            raise DiLaServeError(
                f"{self.name} cannot start: port {self.port} is taken; choose another port"
            )
        self._process = _spawn(self.argv, self.log_path)
        await self._wait_until_ready(self._process, timeout_s)

    async def stop(self, *, timeout_s: float = 5.0) -> None:
        """Ask it to end, and kill it when it has not ended after `timeout_s`."""
        await self._end(signal.SIGTERM, timeout_s)

    async def kill(self) -> None:
        """End it at once, with nothing flushed."""
        await self._end(signal.SIGKILL, 5.0)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the running server (SIGSTOP makes it hang)."""
        if self._process:
            self._process.send_signal(number)

    async def _end(self, number: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _wait_until_ready(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not await self.answers(self.port):
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                await self.kill()
                what = f"ended with {code}" if code is not None else f"silent for {timeout_s} s"
                raise DiLaServeError(
                    f"{self.name} did not come up on port {self.port}: {what}; "
                    f"its log ends: {_tail(self.log_path)}"
                )
            await asyncio.sleep(_POLL_S)


async def nats_answers(port: int, host: str = LOOPBACK) -> bool:
    """Whether a NATS server greets on this port."""
    return await _exchange(host, port, b"", b"INFO ")


async def valkey_answers(port: int, host: str = LOOPBACK) -> bool:
    """Whether a Valkey or Redis server has loaded its data and takes commands on this port;
    one that asks for a password counts."""
    return await _exchange(host, port, b"PING\r\n", b"+PONG", b"-NOAUTH")


def die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel kill the child when its parent ends however it ends: to
    be exact, when the thread ends that started the child, so start it from the main thread.
    None where the kernel cannot (not Linux)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: no lock is taken after it

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent died before the signal was armed

    return arm


@asynccontextmanager
async def _running(server: EmbeddedServer) -> AsyncIterator[None]:
    try:
        await server.start()
        yield
    finally:
        await server.stop()


def _spawn(argv: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(os.getpid()),
        )


async def _exchange(host: str, port: int, send: bytes, *expected: bytes) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(send)
                return await reader.readexactly(5) in {text[:5] for text in expected}
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return False


def _tail(path: Path, n_bytes: int = 400) -> str:
    return path.read_bytes()[-n_bytes:].decode(errors="replace").strip()
