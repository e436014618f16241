"""One child process: started, its log forwarded, watched, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dilaserve.embedded import die_with_parent
from dilaserve.supervisor.restarts import RestartPolicy

__all__ = ["Child", "ChildPhase", "ChildSpec", "Probe"]

ChildPhase = Literal["starting", "ready", "restarting", "given_up", "stopped"]

Probe = Callable[[int], Awaitable[bool]]
"""Whether the process with this id serves."""

PROBE_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 10.0
TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `name` is unique in the stack, `service` is what it is one of."""

    name: str
    service: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    probe: Probe
    address: str = ""
    first_env: Mapping[str, str] = field(default_factory=dict)
    """Added for the first start only: a crash point must not be armed again after it fired."""
    is_vital: bool = True
    """Whether the stack is nothing without it: else it does not wait for it at the start."""
    afterwards: Callable[[], Awaitable[None]] | None = None
    """Ends what outlives it, when the stack ends and it has ended for good."""


class Child:
    """A process that is kept running until `stop`. `log` takes (name, line); `changed` is called
    after every change of `phase` or `pid`."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        policy: RestartPolicy,
        log: Callable[[str, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.phase: ChildPhase = "starting"
        self.pid: int | None = None
        self.n_restarts = 0
        self.exit_code: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._policy = policy
        self._log = log
        self._changed = changed
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process and keep it running, in the background."""
        self._keeper = asyncio.get_running_loop().create_task(
            self._keep(), name=f"keep {self.spec.name}"
        )

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the process: SIGTERM, and SIGKILL after `timeout_s`; then what outlives it. No-op
        when it is not running."""
        self._stopping = True
        if self._keeper is not None:
            await self._stop(self._keeper, timeout_s)
        if self.spec.afterwards is not None:
            await self.spec.afterwards()

    async def wait(self) -> None:
        """Until the child is stopped or given up."""
        if self._keeper is not None:
            await asyncio.shield(self._keeper)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and we are about to hear it
                os.kill(self.pid, number)

    async def _stop(self, keeper: asyncio.Task[None], timeout_s: float) -> None:
        if self.pid is None:
            keeper.cancel()
        else:
            self.signal(signal.SIGTERM)
        _, pending = await asyncio.wait([keeper], timeout=timeout_s)
        if pending:
            self._log("supervisor", f"{self.spec.name} ignored SIGTERM for {timeout_s:.0f} s")
            self.signal(signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        self._enter("stopped")

    async def _keep(self) -> None:
        n_failures = 0
        was_ever_ready = False
        while True:
            before = self._refusal()
            was_ready = await self._run_once()
            if self._stopping:
                return
            was_ever_ready |= was_ready
            n_failures = 0 if was_ready else n_failures + 1
            delay_s = self._policy.delay_s(n_failures)
            if not was_ever_ready and before is not None and before == self._refusal():
                delay_s = None  # as its settings and files are, and they stay so
            self._log("supervisor", self._obituary(n_failures, delay_s))
            if delay_s is None:
                self._enter("given_up")
                return
            self._enter("restarting")
            await asyncio.sleep(delay_s)
            self.n_restarts += 1

    async def _run_once(self) -> bool:
        """Run the process to its end; whether it was ready at some time."""
        self.tail.clear()
        try:
            process, log_end = await self._spawn()
        except OSError as error:
            self._log_line(f"cannot be started: {error}")
            return False
        self.pid = process.pid
        self._enter("starting")
        probing = asyncio.create_task(self._probe_until_ready(process.pid))
        try:
            self.exit_code = await process.wait()
        finally:
            probing.cancel()
            self.pid = None
        # The last words of the process; a grandchild may hold the pipe open for longer.
        await asyncio.wait([log_end], timeout=0.5)
        return self.phase == "ready"

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, asyncio.Future[None]]:
        env = {**self.spec.env, **(self.spec.first_env if self.n_restarts == 0 else {})}
        lines = _Lines(self._log_line)
        read_end, write_end = os.pipe()
        try:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: lines, os.fdopen(read_end, "rb", 0)
            )
            # Last, since a process that is started is known by its id from here on.
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                preexec_fn=die_with_parent(os.getpid()),
                process_group=0,  # Ctrl-C reaches us alone, and we end the children in order
            )
        finally:
            os.close(write_end)
        return process, lines.ended

    async def _probe_until_ready(self, pid: int) -> None:
        while not await self.spec.probe(pid):  # noqa: ASYNC110 - the child's readiness is no event here
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._enter("ready")

    def _log_line(self, line: str) -> None:
        self.tail.append(line)
        self._log(self.spec.name, line)

    def _enter(self, phase: ChildPhase) -> None:
        self.phase = phase
        self._changed()

    def _refusal(self) -> str | None:
        """The line with which a service ends that cannot start, if it has ended so."""
        if self.exit_code != 1:
            return None
        words = f"dilaserve-{self.spec.service}: "
        return next((line for line in reversed(self.tail) if line.startswith(words)), None)

    def _obituary(self, n_failures: int, delay_s: float | None) -> str:
        how = _how_it_ended(self.exit_code)
        when = " before it was ready" if n_failures else ""
        if delay_s is not None:
            return f"{self.spec.name} {how}{when}; starting it again"
        return (
            f"{self.spec.name} {how}{when}, {n_failures} times in a row; "
            "given up, its last lines above say why"
        )


class _Lines(asyncio.Protocol):
    """Splits a log into lines of any length."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace").rstrip("\r"))

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
        if not self.ended.done():
            self.ended.set_result(None)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "could not be started"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
