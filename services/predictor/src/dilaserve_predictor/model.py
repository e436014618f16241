"""The trained predictor: gradient-boosted trees for the median and an upper quantile of the steps
left, with what is known of their making. One JSON file, so that replacing it is atomic.

Knows neither bus nor recordings, and not how trees are grown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dilaserve.errors import DiLaServeError
from dilaserve.messages import Count, StepQuestion
from dilaserve_predictor.features import FEATURES, OUTPUT_LENGTH, Floats, feature_matrix
from dilaserve_predictor.trees import Tree, Trees

__all__ = [
    "FEWEST_STEPS",
    "FILE_NAME",
    "Error",
    "ModelInfo",
    "Predictor",
    "PredictorError",
    "StepModel",
]

FILE_NAME = "predictor.json"
FORMAT = 1
FEWEST_STEPS = 1.0
"""Whoever is asked about still has a step to run."""


class PredictorError(DiLaServeError):
    """A step predictor that cannot be trained, read or used."""


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """Of predictions on prompts that were held out: sum of absolute errors over sum of truths."""

    wmape: float
    """After steps: what is asked online."""
    wmape_at_arrival: float
    """Before the first step, when nothing is known but threshold and length."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a predictor was made, and what it is worth."""

    model_id: str
    """Of the language model whose steps it predicts."""
    thresholds: list[float]
    """Those it was trained with, ascending."""
    n_prompts: int
    n_runs: int
    n_switching_runs: int
    """Of these, runs that changed their threshold on the way."""
    n_rows: int
    upper_quantile: float
    n_folds: int
    """Every prompt was held out once, in one of so many folds; the model itself has seen all."""
    errors: dict[str, Error]
    """By variant: one_shot, progress, full."""
    upper_coverage: float
    """Share of the truths at or below the upper quantile; on held-out prompts."""
    refresh_tokens: Count
    """Newly unmasked tokens between two predictions by the paper's 5 % rule (section 3.2.3)."""
    granularity: list[tuple[int, float]]
    """(newly unmasked tokens between two predictions, WMAPE of what the scheduler then knows)."""
    parameters: dict[str, Any]
    """LightGBM's."""
    lightgbm: str
    features: tuple[str, ...] = FEATURES
    format: int = FORMAT


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts remaining steps, as shares of the output length."""

    info: ModelInfo
    median: list[Tree]
    upper: list[Tree]

    def save(self, folder: Path) -> Path:
        """Write FILE_NAME in `folder`, replacing what is there at once. Raises PredictorError."""
        path = folder / FILE_NAME
        written = path.with_suffix(".new")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.write_bytes(_text(self))
            os.replace(written, path)
        except OSError as error:
            raise PredictorError(
                f"step predictor {path} cannot be written: {error.strerror}; give another folder"
            ) from error
        return path

    @classmethod
    def load(cls, folder: Path) -> StepModel:
        """Read what `save` wrote. Raises PredictorError, naming file and remedy."""
        path = folder / FILE_NAME
        try:
            model = msgspec.json.decode(path.read_bytes(), type=cls)
            _check(model.info)
        except OSError as error:
            reason = str(error.strerror)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            reason = str(error)
        else:
            return model
        raise PredictorError(
            f"step predictor {path} cannot be read: {reason}; train it by "
            f"`dilaserve train-predictor STEPS --out {folder}`"
        )


class Predictor:
    """A model ready to be asked."""

    def __init__(self, model: StepModel) -> None:
        self.info = model.info
        self._median = Trees(model.median)
        self._upper = Trees(model.upper)

    def predict(
        self, states: Sequence[StepQuestion], thresholds: Sequence[float]
    ) -> tuple[Floats, Floats]:
        """S states, K thresholds → median and upper quantile of the steps left, each (S, K); at
        least one step, and the quantile never below the median."""
        features = feature_matrix(states, [0.0])
        candidates = np.asarray(thresholds, dtype=np.float64)
        n_output = features[:, OUTPUT_LENGTH, None]
        median = np.maximum(self._median.evaluate(features, candidates) * n_output, FEWEST_STEPS)
        upper = np.maximum(self._upper.evaluate(features, candidates) * n_output, median)
        return median, upper


def _text(model: StepModel) -> bytes:
    """One line a tree, so that a person can read the rest."""
    head = msgspec.json.format(msgspec.json.encode(model.info), indent=1)
    trees = [
        b'"%s": [\n%s\n]' % (name, b",\n".join(map(msgspec.json.encode, trees)))
        for name, trees in ((b"median", model.median), (b"upper", model.upper))
    ]
    return b'{\n"info": %s,\n%s\n}\n' % (head, b",\n".join(trees))


def _check(info: ModelInfo) -> None:
    if info.format != FORMAT:
        raise ValueError(f"format {info.format} is not {FORMAT}, the one of this version")
    if info.features != FEATURES:
        raise ValueError(f"features {info.features} are not {FEATURES}")
    if "full" not in info.errors:
        raise ValueError(f"errors of {', '.join(info.errors) or 'nothing'}, and none of full")
