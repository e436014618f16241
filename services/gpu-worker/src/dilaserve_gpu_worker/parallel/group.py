"""The collectives of one rank, over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dilaserve_gpu_worker.engine.types import EngineLostError

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Of a collective: one that takes longer waits for a rank that has died or hangs."""
LOOPBACK = "127.0.0.1"


class GroupPeers:
    """See models.peers.Peers. The ranks share one machine and meet at a port of its loopback.

    A collective raises EngineLostError when another rank has died, or does not come in time.
    """

    def __init__(self, rank: int, degree: int, device: torch.device) -> None:
        self.rank = rank
        self.degree = degree
        self._device = device

    def join(self, port: int) -> None:
        """Meet the other ranks; until all are there, no longer than a collective may take."""
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(self._device)
        _or_lost(
            lambda: dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                init_method=f"tcp://{LOOPBACK}:{port}",
                rank=self.rank,
                world_size=self.degree,
                timeout=timedelta(seconds=TIMEOUT_S),
                device_id=self._device if is_gpu else None,
            )
        )

    def leave(self) -> None:
        """Give the group up; nothing happens where it was never joined."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' tensors. On CPUs in the order of the ranks: a ring's order depends on
        where an element stands in the tensor, and so on the batch mates of a row."""
        if x.is_cuda:
            _or_lost(lambda: dist.all_reduce(x))
            return x
        return reduce(torch.add, self._all(x))

    def gather(self, x_NV: Tensor) -> Tensor:
        """The ranks' slices of the last dimension, joined."""
        return torch.cat(self._all(x_NV), dim=-1)

    def _all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        _or_lost(lambda: dist.all_gather(parts, x.contiguous()))
        return parts


def _or_lost(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # all that torch.distributed raises, time-outs included
        what = str(error).partition("\n")[0]
        raise EngineLostError(
            f"a rank of the tensor-parallel group does not answer ({what}); see its own words in "
            "the log; the instance has to be started again"
        ) from error
