"""A capture for a CPU, by the rules of a CUDA graph, for trials: operators are written down with
the very tensors that they read and write, and a replay runs them again, over the same memory.

Numbers that Python computed are fixed by it, and what would wait for the device is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["WAITING", "TapeCapture"]

WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
)
"""Operators for whose results the processor has to wait: they return numbers, or sizes."""


class TapeCapture:
    """See graphs.Capture."""

    def has_room(self) -> bool:
        """See graphs.Capture."""
        return True

    def __call__(self, compute: Callable[[], Tensor]) -> Tape:
        """See graphs.Capture. Raises RuntimeError for an operator of WAITING."""
        with _Recorder() as recorder:
            output = compute()
        return Tape(recorder.calls, output)


class Tape:
    """See graphs.Captured."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]], output: Tensor) -> None:
        self._calls = calls
        self.output = output

    def replay(self) -> None:
        """See graphs.Captured."""
        for operator, args, kwargs, result in self._calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise RuntimeError(f"{func} waits for the device: it cannot be captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result
