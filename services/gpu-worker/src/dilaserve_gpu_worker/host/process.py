"""The engine's process as its parent sees it: starts it, carries orders and reports, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import IO

import msgspec

from dilaserve.embedded import die_with_parent
from dilaserve.errors import DiLaServeError
from dilaserve_gpu_worker.engine.types import EngineLostError
from dilaserve_gpu_worker.frames import LENGTH, frame
from dilaserve_gpu_worker.host.orders import Lost, Order, Ping, Ready, Report
from dilaserve_gpu_worker.host.port import EnginePort
from dilaserve_gpu_worker.huge_pages import with_huge_pages

__all__ = ["EngineNotStartedError", "EngineProcess", "engine_process"]

COMMAND = [sys.executable, "-m", "dilaserve_gpu_worker.host"]
EXIT_TIMEOUT_S = 5.0
"""For the exit of a process that has closed its pipe, to know its code."""
END_TIMEOUT_S = 3.0
"""For the exit of one that has run its last pass and has been told to end."""


class EngineNotStartedError(DiLaServeError):
    """The engine's process ended before it was ready. `is_said`: it has said itself why."""

    def __init__(self, code: int) -> None:
        super().__init__(
            f"the engine's process was ended by signal {-code} while it loaded the model; if the "
            "machine's memory was full, use a smaller model or DILASERVE_DTYPE=bfloat16"
        )
        self.is_said = code > 0


class EngineProcess:
    """A child that has been started. See `engine_process`."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        reports: asyncio.StreamReader,
        orders: asyncio.WriteTransport,
    ) -> None:
        self._child = child
        self._reports = reports
        self._orders = orders
        self._decoder = msgspec.msgpack.Decoder(Report)
        self.listens = False
        """Whether the end of its orders ends it; else it is killed at the end."""

    async def ready(self) -> Ready:
        """What it has loaded. Raises EngineNotStartedError when it ends before that, and
        EngineLostError when it says why it cannot go on."""
        report = await self._next()
        if isinstance(report, Lost):
            raise EngineLostError(report.reason)
        if not isinstance(report, Ready):
            raise EngineNotStartedError(await self.code(EXIT_TIMEOUT_S) or 1)
        self.listens = True
        return report

    async def carry(self, port: EnginePort) -> None:
        """Hand over all reports; when they end, the engine is lost, unless it was to end."""
        while (report := await self._next()) is not None:
            port.heard(report)
        if not port.has_ended:
            port.heard(Lost(reason=f"the engine's process has ended ({await self._words()})"))

    def send(self, orders: Sequence[Order] | Ping) -> None:
        """Without waiting. What a process that has ended does not get is no loss."""
        if not self._orders.is_closing():
            self._orders.write(frame(orders))

    async def _next(self) -> Report | None:
        try:
            (length,) = LENGTH.unpack(await self._reports.readexactly(LENGTH.size))
            report: Report = self._decoder.decode(await self._reports.readexactly(length))
        except asyncio.IncompleteReadError:
            return None
        return report

    async def _words(self) -> str:
        code = await self.code(EXIT_TIMEOUT_S)
        how = "it hangs" if code is None else f"exit code {code}"
        return f"{how}; see its own words in the log, and start the instance again"

    async def code(self, timeout_s: float) -> int | None:
        """Its exit code, when it has ended within that time."""
        try:
            return await asyncio.to_thread(self._child.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None


@asynccontextmanager
async def engine_process() -> AsyncIterator[EngineProcess]:
    """Start the engine's process, with this one's environment (and huge pages, see huge_pages), and
    end it at the end. Call it in the main thread: the child dies with the thread that started it.
    """
    child = _start()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with closing(await _writer(child.stdin)) as orders:
            reports, reading = await _reader(child.stdout)
            with closing(reading):
                process = EngineProcess(child, reports, orders)
                yield process
                orders.close()
                if process.listens:
                    await process.code(END_TIMEOUT_S)
    finally:
        child.kill()  # does no harm to one that has ended
        child.wait()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_huge_pages(os.environ),
        preexec_fn=_signals_left_to(die_with_parent(os.getpid())),
    )


def _signals_left_to(then: Callable[[], None] | None) -> Callable[[], None]:
    """A `preexec_fn` for a child that never hears a terminal's or a container's signal to all,
    which are its parent's business; handlers of its own would come seconds later."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if then is not None:
            then()

    return ignore


async def _reader(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


async def _writer(pipe: IO[bytes]) -> asyncio.WriteTransport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
    return transport
