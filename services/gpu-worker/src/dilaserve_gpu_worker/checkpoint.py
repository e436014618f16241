"""The tensors of a model folder as torch's, memory-mapped. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

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


class Checkpoint:
    """Named tensors of a folder, memory-mapped; a context manager that closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles(folder, "pt")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    @property
    def dtype(self) -> torch.dtype:
        """Type to compute the stored tensors in, fp32 where theirs differ."""
        stored = {self._files.stored_type(name) for name in self._files.names}
        return _DTYPES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32

    def tensor(self, name: str, shape: Sequence[int], part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor `name` on the CPU, as stored, or a part of it; nothing else is read. Raises
        ModelFolderError as TensorFiles.check does."""
        self._files.check(name, shape)
        tensor: Tensor = self._files.read(name, part)
        return tensor

    def check_ends_before(self, name: str) -> None:
        """See TensorFiles."""
        self._files.check_ends_before(name)
