"""What a service says of its settings and of the model's folder before it is started.

A service's module `check` answers; whoever wants to know runs it as a process of its own, since
the shared library imports no service. It takes the environment that the service would have.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from dilaserve.errors import DiLaServeError

__all__ = ["Check", "Checked", "answer", "ask"]

TIMEOUT_S = 60.0
REFUSED = 3
"""The exit code of an answer that is no; Python ends with 1 where it cannot even ask."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A service would start with this; `doubts`: what it would warn of."""

    detail: str
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """A question: the module of a service, and the environment it is to look at."""

    module: str
    environ: Mapping[str, str]


_decode = msgspec.json.Decoder(Checked).decode


def answer(check: Callable[[], Checked]) -> None:
    """Run a service's check as the main program of its module: the answer goes to stdout, exit
    code 0, or the error's message to stderr, exit code 3."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(check()))
    except DiLaServeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)


def ask(checks: Iterable[Check]) -> list[Checked | DiLaServeError]:
    """Ask all at once; an answer or an error for each, in order."""
    started = [(check, _start(check)) for check in checks]
    return [_answer_of(check, process) for check, process in started]


def _start(check: Check) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"{check.module}.check"],
        env=dict(check.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer_of(check: Check, process: subprocess.Popen[str]) -> Checked | DiLaServeError:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return DiLaServeError(
            f"{check.module}.check does not end within {TIMEOUT_S:.0f} s; is the disk of the "
            "model's folder slow, or gone?"
        )
    if process.returncode == 0:
        return _decode(out)
    last = (err.strip().splitlines() or ["no word"])[-1]
    if process.returncode == REFUSED:
        return DiLaServeError(last)
    return DiLaServeError(
        f"{check.module}.check ended with exit code {process.returncode}: {last}; "
        "see whether all packages are installed: `dilaserve doctor`"
    )
