"""Evaluates gradient-boosted trees for a few states under every candidate threshold, with NumPy.

LightGBM grows them; it is not needed to ask them, nor is the OpenMP library that it wants from the
system. A leaf is found by ruling out: every node whose condition fails rules out the leaves on its
left, and the first one left over is the answer (QuickScorer, Lucchese et al. 2015). All candidates
share what does not depend on the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dilaserve_predictor.features import FEATURES, THRESHOLD, Floats

__all__ = ["MOST_LEAVES", "Tree", "Trees"]

Masks: TypeAlias = npt.NDArray[np.uint64]

MOST_LEAVES = 64
_ALL = (1 << MOST_LEAVES) - 1


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """One regression tree; its leaves count from 0, left to right. Raises ValueError for nonsense.

    A state goes left at a node where its feature is at most the split.
    """

    features: list[int]
    """By node: index into FEATURES."""
    splits: list[float]
    lefts: list[tuple[int, int]]
    """Leaves on the node's left: the first, and the one behind the last."""
    values: list[float]
    """By leaf."""

    def __post_init__(self) -> None:
        n_nodes, n_leaves = len(self.features), len(self.values)
        if not len(self.splits) == len(self.lefts) == n_nodes == n_leaves - 1 < MOST_LEAVES:
            raise ValueError(f"a tree of {n_nodes} nodes and {n_leaves} leaves")
        if not all(0 <= feature < len(FEATURES) for feature in self.features):
            raise ValueError(f"a tree with features {self.features}, of {len(FEATURES)}")
        if not all(0 <= first < end < n_leaves for first, end in self.lefts):
            raise ValueError(f"a tree with nodes over leaves {self.lefts}, of {n_leaves}")


class Trees:
    """A sum of trees, as arrays."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._by_state = _Nodes(trees, of_threshold=False)
        self._by_threshold = _Nodes(trees, of_threshold=True)
        n_leaves = max((len(tree.values) for tree in trees), default=1)
        self._values = np.zeros((len(trees), n_leaves))
        for values, tree in zip(self._values, trees, strict=True):
            values[: len(tree.values)] = tree.values
        self._index = np.arange(len(trees))

    def evaluate(self, features: Floats, thresholds: Floats) -> Floats:
        """(S, 11) states and K thresholds → (S, K); the states' own threshold does not matter."""
        candidates = np.zeros((len(thresholds), len(FEATURES)))
        candidates[:, THRESHOLD] = thresholds
        left_SKT = (
            self._by_state.left_over(features)[:, None, :]
            & self._by_threshold.left_over(candidates)[None, :, :]
        )
        result: Floats = self._values[self._index, _lowest_bit(left_SKT)].sum(axis=2)
        return result


class _Nodes:
    """The nodes of T trees that look at the threshold, or those that do not; M of a tree at most.
    A tree with fewer is filled up with nodes that rule out nothing."""

    def __init__(self, trees: Sequence[Tree], *, of_threshold: bool) -> None:
        chosen = [
            [n for n, f in enumerate(tree.features) if (f == THRESHOLD) == of_threshold]
            for tree in trees
        ]
        shape = len(trees), max(map(len, chosen), default=0)
        self._features = np.zeros(shape, dtype=np.intp)
        self._splits = np.full(shape, np.inf)
        self._masks = np.full(shape, _ALL, dtype=np.uint64)
        for t, (tree, nodes) in enumerate(zip(trees, chosen, strict=True)):
            for m, n in enumerate(nodes):
                first, end = tree.lefts[n]
                self._features[t, m] = tree.features[n]
                self._splits[t, m] = tree.splits[n]
                self._masks[t, m] = _ALL ^ (((1 << (end - first)) - 1) << first)

    def left_over(self, features: Floats) -> Masks:
        """(N, 11) → (N, T): a bit for each leaf that is not ruled out."""
        is_right_NTM = features[:, self._features] > self._splits
        masks_NTM = np.where(is_right_NTM, self._masks, np.uint64(_ALL))
        result: Masks = np.bitwise_and.reduce(masks_NTM, axis=2)
        return result


def _lowest_bit(masks: Masks) -> npt.NDArray[np.intp]:
    """Index of the lowest bit set; every mask has one."""
    lowest = masks & (~masks + np.uint64(1))
    return np.frexp(lowest.astype(np.float64))[1].astype(np.intp) - 1
