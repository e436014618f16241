"""The tensors of a model folder as torch's, memory-mapped. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dilaserve_gpu_worker.model_files import TensorFiles

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float32,
}
"""What tensors of each of STORED_TYPES are computed in."""


class Checkpoint(TensorFiles):
    """Named tensors of a folder, on the CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "pt")

    @property
    def dtype(self) -> torch.dtype:
        """Type to compute the stored tensors in, fp32 where theirs differ."""
        stored = {self.stored_type(name) for name in self.names}
        return _DTYPES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32

    def tensor(self, name: str, shape: Sequence[int], part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor `name` as stored, or a part of it; nothing else is read. Raises
        ModelFolderError as `check` does."""
        self.check(name, shape)
        tensor: Tensor = self.read(name, part)
        return tensor
