"""Grows gradient-boosted trees with LightGBM, and takes them over as plain data. The only module
that knows LightGBM, which is needed to train and not to predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dilaserve_predictor.features import FEATURES, Floats
from dilaserve_predictor.model import PredictorError
from dilaserve_predictor.trees import Tree

__all__ = ["Grown", "grow", "library_version"]


class Grown:
    """Trees over some of the features."""

    def __init__(self, booster: Any, columns: Sequence[int]) -> None:
        self._booster = booster
        self._columns = list(columns)

    def evaluate(self, features: Floats) -> Floats:
        """(N, 11) → (N,)."""
        chosen = features[:, self._columns]
        result: Floats = np.asarray(self._booster.predict(chosen, num_threads=1))
        return result

    def trees(self) -> list[Tree]:
        """As plain data."""
        dumped = self._booster.dump_model()["tree_info"]
        return [_tree(each["tree_structure"], self._columns) for each in dumped]


def grow(
    features: Floats,
    target: Floats,
    weight: Floats,
    *,
    columns: Sequence[int],
    parameters: Mapping[str, Any],
    n_trees: int,
) -> Grown:
    """Trees for `target` (N,) that look at `columns` of `features` (N, 11) only. Raises
    PredictorError where there is no LightGBM."""
    lightgbm = _lightgbm()
    names = [FEATURES[column] for column in columns]
    data = lightgbm.Dataset(features[:, list(columns)], target, weight=weight, feature_name=names)
    return Grown(lightgbm.train(dict(parameters), data, n_trees), columns)


def library_version() -> str:
    """Of LightGBM."""
    return str(_lightgbm().__version__)


def _lightgbm() -> ModuleType:
    try:
        import lightgbm
    except ImportError as error:
        raise PredictorError(
            "LightGBM is not installed, and training needs it; "
            "pip install 'dilaserve-predictor[train]'"
        ) from error
    except OSError as error:  # its library does not find OpenMP
        raise PredictorError(
            f"LightGBM cannot be loaded: {error}; install OpenMP, on Debian: apt install libgomp1"
        ) from error
    module: ModuleType = lightgbm
    return module


def _tree(root: Mapping[str, Any], columns: Sequence[int]) -> Tree:
    features: list[int] = []
    splits: list[float] = []
    lefts: list[tuple[int, int]] = []
    values: list[float] = []

    def visit(node: Mapping[str, Any]) -> None:
        """In order, so that leaves count from left to right."""
        if "leaf_value" in node:
            values.append(node["leaf_value"])
            return
        first = len(values)
        visit(node["left_child"])
        features.append(columns[node["split_feature"]])
        splits.append(node["threshold"])
        lefts.append((first, len(values)))
        visit(node["right_child"])

    visit(root)
    return Tree(features=features, splits=splits, lefts=lefts, values=values)
