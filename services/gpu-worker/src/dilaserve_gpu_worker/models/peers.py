"""The ranks that compute one model together, as a model sees them: each holds a slice of it.

Heads, feed-forward width and vocabulary are split evenly (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Peers(Protocol):
    """All ranks call the same methods in the same order."""

    rank: int
    degree: int
    """Number of ranks."""

    def reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' tensors."""
        ...

    def gather(self, x_NV: Tensor) -> Tensor:
        """The ranks' slices of the last dimension, joined."""
        ...


class Alone:
    """A model in one piece."""

    rank = 0
    degree = 1

    def reduce(self, x: Tensor) -> Tensor:
        """It is the sum."""
        return x

    def gather(self, x_NV: Tensor) -> Tensor:
        """It is all there is."""
        return x_NV


class Apart:
    """One of several ranks that does without the others: sizes are right, values are not."""

    def __init__(self, rank: int, degree: int) -> None:
        self.rank = rank
        self.degree = degree

    def reduce(self, x: Tensor) -> Tensor:
        """As if the others had nothing."""
        return x

    def gather(self, x_NV: Tensor) -> Tensor:
        """As if the others had the same."""
        return torch.cat([x_NV] * self.degree, dim=-1)
