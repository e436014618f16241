"""How long a virtual instance takes from its launch until it serves."""

from __future__ import annotations

import msgspec

__all__ = ["StartUp"]


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
