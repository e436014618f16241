"""Our evaluation of the trees is LightGBM's."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from dilaserve_predictor.features import FEATURES, THRESHOLD
from dilaserve_predictor.growing import grow
from dilaserve_predictor.trees import Tree, Trees

RNG = np.random.default_rng(7)
CANDIDATES = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
EVERYTHING = list(range(len(FEATURES)))
PARAMETERS = {"verbose": -1, "num_threads": 1, "min_data_in_leaf": 3, "objective": "regression"}


def made_up_rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    rows = RNG.random((n, len(FEATURES)))
    rows[:, THRESHOLD] = RNG.choice(CANDIDATES, n)
    target = rows[:, 0] + rows[:, THRESHOLD] * rows[:, 8] + (rows[:, 6] > 0.5)
    return rows, target


@pytest.mark.parametrize("num_leaves", [2, 15, 31, 64])
def test_every_state_under_every_candidate(num_leaves: int) -> None:
    rows, target = made_up_rows(2000)
    grown = grow(
        rows,
        target,
        np.ones(len(rows)),
        columns=EVERYTHING,
        parameters=PARAMETERS | {"num_leaves": num_leaves},
        n_trees=30,
    )
    states, _ = made_up_rows(200)
    states[:50] = rows[:50]  # values at which a tree splits
    ours = Trees(grown.trees()).evaluate(states, CANDIDATES)
    for k, candidate in enumerate(CANDIDATES):
        states[:, THRESHOLD] = candidate
        np.testing.assert_allclose(ours[:, k], grown.evaluate(states), rtol=1e-12, atol=1e-12)
    assert ours.std() > 0.1


def test_trees_over_some_of_the_features() -> None:
    rows, target = made_up_rows(500)
    grown = grow(
        rows,
        target,
        np.ones(len(rows)),
        columns=[0, 8],
        parameters=PARAMETERS,
        n_trees=5,
    )
    ours = Trees(grown.trees()).evaluate(rows, np.array([0.9]))
    np.testing.assert_allclose(ours[:, 0], grown.evaluate(rows), rtol=1e-12)


def test_a_tree_that_never_asks() -> None:
    trees = Trees([Tree(features=[], splits=[], lefts=[], values=[3.0])] * 2)
    assert trees.evaluate(np.zeros((3, len(FEATURES))), CANDIDATES).tolist() == [[6.0] * 5] * 3


def test_no_trees_and_no_states() -> None:
    assert Trees([]).evaluate(np.zeros((2, len(FEATURES))), CANDIDATES).tolist() == [[0.0] * 5] * 2
    some = Trees([Tree(features=[0], splits=[0.5], lefts=[(0, 1)], values=[1.0, 2.0])])
    assert some.evaluate(np.zeros((0, len(FEATURES))), CANDIDATES).shape == (0, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"features": [0, 1]},
        {"features": [11]},
        {"features": [-1]},
        {"lefts": [(0, 2)]},
        {"lefts": [(1, 1)]},
        {"values": [1.0]},
    ],
)
def test_nonsense_is_no_tree(change: dict[str, object]) -> None:
    values = {"features": [0], "splits": [0.5], "lefts": [(0, 1)], "values": [1.0, 2.0]} | change
    with pytest.raises(msgspec.ValidationError, match="a tree"):
        msgspec.convert(values, Tree)


def test_predicting_needs_no_lightgbm() -> None:
    script = "import sys, dilaserve_predictor.service\nprint('lightgbm' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False"]
