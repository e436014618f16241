"""The trained predictor: gradient-boosted trees for the median and an upper quantile of the steps
left, with what is known of their making. One JSON file, so that replacing it is atomic.

Knows neither bus nor recordings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightgbm
import msgspec
import numpy as np

from dilaserve.errors import DiLaServeError
from dilaserve_predictor.features import FEATURES, OUTPUT_LENGTH, Floats

__all__ = ["FILE_NAME", "Error", "ModelInfo", "PredictorError", "StepModel", "fit_booster"]

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
    refresh_tokens: int
    """Newly unmasked tokens between two predictions by the paper's 5 % rule (section 3.2.3)."""
    granularity: list[tuple[int, float]]
    """(newly unmasked tokens between two predictions, WMAPE of what the scheduler then knows)."""
    parameters: dict[str, Any]
    """LightGBM's."""
    lightgbm: str
    features: tuple[str, ...] = FEATURES
    format: int = FORMAT


class _File(msgspec.Struct, frozen=True, kw_only=True):
    info: ModelInfo
    median: str
    upper: str


class StepModel:
    """Predicts remaining steps. Safe to use from one thread at a time."""

    def __init__(self, info: ModelInfo, median: lightgbm.Booster, upper: lightgbm.Booster) -> None:
        self.info = info
        self._median = median
        self._upper = upper

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """(N, 11) → median and upper quantile of the steps left, each (N,); at least one step,
        and the quantile never below the median."""
        n_output = features[:, OUTPUT_LENGTH]
        median = np.maximum(evaluate(self._median, features) * n_output, FEWEST_STEPS)
        upper = np.maximum(evaluate(self._upper, features) * n_output, median)
        return median, upper

    def save(self, folder: Path) -> Path:
        """Write FILE_NAME in `folder`, replacing what is there at once. Raises PredictorError."""
        path = folder / FILE_NAME
        content = _File(
            info=self.info,
            median=self._median.model_to_string(),
            upper=self._upper.model_to_string(),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(".new")
            written.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
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
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            _check(file.info)
            return cls(file.info, _booster(file.median), _booster(file.upper))
        except OSError as error:
            reason = error.strerror
        except (msgspec.DecodeError, lightgbm.basic.LightGBMError, ValueError) as error:
            reason = str(error)
        raise PredictorError(
            f"step predictor {path} cannot be read: {reason}; train it by "
            f"`dilaserve train-predictor STEPS --out {folder}`"
        )


def fit_booster(
    features: Floats,
    target: Floats,
    weight: Floats,
    *,
    names: list[str],
    parameters: Mapping[str, Any],
    n_trees: int,
    told: Callable[[], None] = lambda: None,
) -> lightgbm.Booster:
    """Gradient-boosted trees for `target`; `told` is called after each tree."""
    data = lightgbm.Dataset(features, target, weight=weight, feature_name=names)
    return lightgbm.train(dict(parameters), data, n_trees, callbacks=[lambda _: told()])


def evaluate(booster: lightgbm.Booster, features: Floats) -> Floats:
    """(N, columns) → (N,). One thread: a batch is small, and others want the cores."""
    result: Floats = np.asarray(booster.predict(features, num_threads=1))
    return result


def _booster(text: str) -> lightgbm.Booster:
    booster = lightgbm.Booster(model_str=text)
    if booster.feature_name() != list(FEATURES):
        raise ValueError(
            f"its trees use the features {booster.feature_name()}, not {list(FEATURES)}"
        )
    return booster


def _check(info: ModelInfo) -> None:
    if info.format != FORMAT:
        raise ValueError(f"format {info.format} is not {FORMAT}, the one of this version")
    if info.features != FEATURES:
        raise ValueError(f"features {info.features} are not {FEATURES}")
