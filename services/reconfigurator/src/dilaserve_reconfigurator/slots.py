"""Places for instances."""

from __future__ import annotations

import msgspec

__all__ = ["Slot"]


class Slot(msgspec.Struct, frozen=True):
    """A place for an instance: GPUs of one node."""

    node: int
    gpus: tuple[int, ...]

    @property
    def tp_degree(self) -> int:
        """Of the instance that fits."""
        return len(self.gpus)
