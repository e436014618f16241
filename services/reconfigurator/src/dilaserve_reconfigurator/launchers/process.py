"""Launches instances as processes of this machine; GPUs, or CPU cores, are slots.

An instance survives its launcher. Each has a file that says where it is and a lock that it holds
as long as it lives, so the next launcher knows which still run, whatever their process ids are.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dilaserve_reconfigurator.launchers import Launched, LaunchError, refuse_beside
from dilaserve_reconfigurator.slots import Slot

__all__ = ["ProcessLauncher", "cpu_environ", "cuda_environ"]

LOOK_EVERY_S = 0.05
N_LOG_BYTES = 2000
"""Of the end of a log, in which the reason of an end is looked for."""
# The process says who it is before it becomes the instance, so that no crash of the launcher can
# come between the two.
SAY_PID = 'echo $$ > "$0.part" && mv "$0.part" "$0" && exec "$@"'


_Index = Annotated[int, Meta(ge=0)]


class _Place(msgspec.Struct, frozen=True):
    node: _Index
    gpus: Annotated[tuple[_Index, ...], Meta(min_length=1)]


class ProcessLauncher:
    """See Launcher. `command` starts an instance, `environ_of` adds what a slot needs to
    `environ`; `grace_s` is how long an instance may take to end by itself."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        environ_of: Callable[[Slot], Mapping[str, str]],
        grace_s: float = 10.0,
    ) -> None:
        self._folder = folder
        self._command = list(command)
        self._environ = dict(environ)
        self._environ_of = environ_of
        self._grace_s = grace_s
        self._ours: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    async def running(self) -> list[Launched]:
        """See Launcher. Raises LaunchError for one whose place cannot be read: it may have any."""
        return [Launched(name, self._slot(name)) for name in self.names()]

    def names(self) -> list[str]:
        """Of all that run, also where their places cannot be read."""
        found = []
        for path in sorted(self._folder.glob("*.place")):
            if self._lives(path.stem):
                found.append(path.stem)
            elif path.is_file():
                self._forget(path.stem)
        return found

    async def launch(self, name: str, slot: Slot) -> None:
        """See Launcher."""
        for other in await self.running():
            refuse_beside(other, name, slot)
        try:
            self._forget(name)
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._path(name, "part")
            unfinished.write_bytes(msgspec.json.encode(_Place(slot.node, slot.gpus)))
            unfinished.replace(self._path(name, "place"))
            self._ours[name] = self._start(name, slot)
        except OSError as error:
            with contextlib.suppress(OSError):  # the same again
                self._forget(name)
            raise LaunchError(f"instance {name!r} cannot be started: {error}") from error

    async def wait(self, name: str) -> str:
        """See Launcher."""
        while self._lives(name):  # noqa: ASYNC110  # nobody tells of a lock's end
            await asyncio.sleep(LOOK_EVERY_S)
        return self._last_words(name)

    async def stop(self, name: str) -> None:
        """See Launcher. Raises LaunchError where the file with its process id is no such file."""
        waited_s, is_told = 0.0, False
        while self._lives(name):
            if not is_told:
                is_told = self._signal(name, by_force=False)
            elif waited_s >= self._grace_s:
                self._signal(name, by_force=True)
            await asyncio.sleep(LOOK_EVERY_S)
            waited_s += LOOK_EVERY_S
        self._forget(name)

    def _start(self, name: str, slot: Slot) -> subprocess.Popen[bytes]:
        environ = {**self._environ, **self._environ_of(slot), "DILASERVE_WORKER_NAME": name}
        with self._path(name, "lock").open("wb") as lock, self._path(name, "log").open("wb") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return subprocess.Popen(
                ["/bin/sh", "-c", SAY_PID, str(self._path(name, "pid")), *self._command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # a signal to the launcher's terminal is not for it
            )

    def _lives(self, name: str) -> bool:
        """Whether somebody holds its lock."""
        if name in self._ours:
            self._ours[name].poll()  # so that it does not stay a zombie
        try:
            with self._path(name, "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _signal(self, name: str, *, by_force: bool) -> bool:
        """To it, or by force to all of its session, the other ranks included. False if it has yet
        to say who it is."""
        pid = self._pid(name)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):  # its lock goes with it
            if by_force:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)
        return True

    def _pid(self, name: str) -> int | None:
        """None if it has yet to say who it is. 0 and -1 would be whole groups of processes."""
        if name in self._ours:
            return self._ours[name].pid
        path = self._path(name, "pid")
        try:
            text = path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        if not (text.isascii() and text.isdecimal() and 1 < int(text) < 2**31):
            raise LaunchError(
                f"{path} says {text[:20]!r} instead of the process id of {name!r}; end the process "
                "that holds its lock by hand"
            )
        return int(text)

    def _slot(self, name: str) -> Slot:
        path = self._path(name, "place")
        try:
            place = msgspec.json.decode(path.read_bytes(), type=_Place)
        except (OSError, msgspec.DecodeError) as error:
            raise LaunchError(
                f"{path} does not say where {name!r} is, which runs: {error}; end that process, "
                "the file is then removed"
            ) from error
        return Slot(place.node, place.gpus)

    def _last_words(self, name: str) -> str:
        process = self._ours.get(name)
        code = process.wait() if process is not None else None
        how = f"exit code {code}" if code is not None else "it has ended"
        try:
            lines = self._path(name, "log").read_bytes()[-N_LOG_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return how
        return f"{how}; {lines.strip().splitlines()[-1]}" if lines.strip() else how

    def _forget(self, name: str) -> None:
        """All but the log, which stays until the name is used again."""
        process = self._ours.pop(name, None)
        if process is not None:
            process.wait()  # its lock is free, so it is ending
        for kind in ("place", "pid", "lock"):
            self._path(name, kind).unlink(missing_ok=True)

    def _path(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"


def cuda_environ(slot: Slot) -> dict[str, str]:
    """An instance that sees its GPUs and no others."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, slot.gpus)),
        "DILASERVE_TP_DEGREE": str(slot.tp_degree),
    }


def cpu_environ(slot: Slot) -> dict[str, str]:
    """An instance with a thread for each rank."""
    return {
        "DILASERVE_DEVICE": "cpu",
        "DILASERVE_THREADS": "1",
        "DILASERVE_TP_DEGREE": str(slot.tp_degree),
    }
