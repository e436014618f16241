"""Moves a pass's arrays to a device: many small ones as one piece of pinned memory, in one copy
that nobody waits for. Knows not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Array", "StaticArrays", "fetch", "put"]

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes; as kernels want their vectors."""
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
_NUMPY_DTYPES = {dtype: numpy_dtype for numpy_dtype, dtype in _DTYPES.items()}


def put(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays on the device. On a CPU they are not copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # The allocator of pinned memory gives no piece out again before its copy has ended.
    return _views(_packed(arrays, device).to(device, non_blocking=True), arrays)


def fetch(tensors: Sequence[Tensor]) -> list[Array]:
    """What the device has computed, in one copy; waits for it. On a CPU nothing is copied."""
    if tensors[0].device.type == "cpu":
        return [x.numpy() for x in tensors]
    return fetch_packed(tensors)


def fetch_packed(tensors: Sequence[Tensor]) -> list[Array]:
    """The same for tensors on a device that is not the CPU. They travel as fp64, in which integers
    up to 2**53 are exact."""
    packed: Array = torch.cat([x.flatten().double() for x in tensors]).cpu().numpy()
    ends = accumulate([x.numel() for x in tensors], initial=0)
    return [
        packed[start:end].astype(_NUMPY_DTYPES[x.dtype]).reshape(x.shape)
        for x, (start, end) in zip(tensors, pairwise(ends), strict=True)
    ]


class StaticArrays:
    """Tensors on a device at addresses that stay, so that what was captured reads them, and is
    given new content in one copy."""

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        self._shapes = _shapes(arrays)
        self._buffer = torch.empty(_offsets(arrays)[-1], dtype=torch.uint8, device=device)
        self.tensors = _views(self._buffer, arrays)
        self.fill(arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Overwrite all. Raises ValueError for arrays of other shapes or types."""
        if _shapes(arrays) != self._shapes:
            raise ValueError(f"arrays of {_shapes(arrays)} in the place of {self._shapes}")
        self._buffer.copy_(_packed(arrays, self._buffer.device), non_blocking=True)


def _packed(arrays: Sequence[Array], device: torch.device) -> Tensor:
    offsets = _offsets(arrays)
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    into = packed.numpy()
    for array, start in zip(arrays, offsets, strict=False):
        into[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def _views(buffer: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    return [
        buffer[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, _offsets(arrays), strict=False)
    ]


def _offsets(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, and where the last one ends, in bytes."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *accumulate(sizes)]


def _shapes(arrays: Sequence[Array]) -> list[tuple[tuple[int, ...], str]]:
    return [(array.shape, str(array.dtype)) for array in arrays]
