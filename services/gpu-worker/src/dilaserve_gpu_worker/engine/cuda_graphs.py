"""Captures on a CUDA device. All graphs of an engine share one pool of memory: one runs at a time,
and its result is used before the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["CudaCapture"]

RESERVE_BYTES = 1 << 30
"""Free memory below which nothing more is captured: passes that are not need it."""


class CudaCapture:
    """See graphs.Capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def has_room(self) -> bool:
        """See graphs.Capture."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > RESERVE_BYTES

    def __call__(self, compute: Callable[[], Tensor]) -> CudaGraph:
        """See graphs.Capture."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # What other threads do meanwhile (pinned memory, NCCL's watchdog) is no mistake.
                capture_error_mode="thread_local",
            ),
        ):
            output = compute()
        return CudaGraph(self._device, graph, output)


class CudaGraph:
    """See graphs.Captured."""

    def __init__(self, device: torch.device, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._device = device
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """See graphs.Captured."""
        with torch.cuda.device(self._device):
            self._graph.replay()
