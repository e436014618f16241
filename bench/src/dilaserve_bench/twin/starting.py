"""How long a virtual instance takes from its launch until it serves."""

from __future__ import annotations

import re

import msgspec

from dilaserve.errors import DiLaServeError

__all__ = ["StartUp", "parse_start_up"]

_NUMBER = r"(\d+(?:\.\d+)?)"
_WRITTEN = re.compile(rf"{_NUMBER}/{_NUMBER}\+{_NUMBER}")


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to read, and everything else. The ranks of an instance read one folder on one disk,
    so the TP degree makes no difference."""

    weights_gb: float = 16.0
    """LLaDA-8B in bfloat16."""
    gb_per_s: float = 2.0
    """From a local NVMe disk that is not read by others."""
    other_s: float = 20.0
    """Process, CUDA context, NCCL, KV pool, first passes. An assumption."""

    @property
    def seconds(self) -> float:
        """From the command to the first heartbeat."""
        return self.other_s + self.weights_gb / self.gb_per_s


def parse_start_up(text: str) -> StartUp:
    """GB / GB a second + seconds, as in 16/2+20. Raises DiLaServeError."""
    found = _WRITTEN.fullmatch(text.replace(" ", ""))
    if found is None or float(found[2]) == 0.0:
        raise DiLaServeError(
            f"--start-up {text!r} is not GB of weights / GB a second + seconds; write for example "
            "16/2+20"
        )
    weights_gb, gb_per_s, other_s = map(float, found.groups())
    return StartUp(weights_gb=weights_gb, gb_per_s=gb_per_s, other_s=other_s)
