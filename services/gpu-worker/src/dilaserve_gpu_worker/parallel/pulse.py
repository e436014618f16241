"""Whether the process of a rank runs: it says so several times a second, in the middle of a pass,
too. Knows no batch.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import IO

__all__ = ["BEAT_S", "Pulse", "beat"]

BEAT_S = 0.25


def beat(pipe: IO[bytes]) -> None:
    """Write a byte, again and again, until nobody reads them any more."""
    with suppress(BrokenPipeError):
        while True:
            pipe.write(b".")
            pipe.flush()
            time.sleep(BEAT_S)


class Pulse:
    """The other end: `feel` it every BEAT_S. Nothing else is to come through `pipe` any more."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        os.set_blocking(self._descriptor, False)
        self.n_missed = 0
        """Times in a row that nothing had come. Counted, not timed: whoever feels may have been
        stopped, too."""

    def feel(self) -> None:
        """Take what has come."""
        try:
            has_beaten = bool(os.read(self._descriptor, 1 << 16))
        except BlockingIOError:
            has_beaten = False
        self.n_missed = 0 if has_beaten else self.n_missed + 1
