"""Trains a step predictor from recorded runs, and measures it on prompts that were held out.

Every prompt is held out once: the trees of a fold never saw any run of the prompts that they are
measured on. The predictor that is kept has seen all of them. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from dilaserve.recording import RecordedStep, is_complete
from dilaserve_predictor.evaluate import coarsest, granularity, one_shot, wmape
from dilaserve_predictor.examples import Booleans, Examples, examples_of, folds, settled_from
from dilaserve_predictor.features import CONFIDENCES, FEATURES, Floats
from dilaserve_predictor.growing import Grown, grow, library_version
from dilaserve_predictor.model import FEWEST_STEPS, Error, ModelInfo, PredictorError, StepModel

__all__ = ["N_FOLDS", "n_fits", "train", "without_confidences"]

N_FOLDS = 5
N_TREES = 100
UPPER_QUANTILE = 0.8
SEED = 42
TREES: dict[str, Any] = {
    "learning_rate": 0.1,
    "num_leaves": 31,
    "min_data_in_leaf": 20,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "seed": SEED,
    "verbose": -1,
}
MEDIAN = {"objective": "quantile", "alpha": 0.5}
UPPER = {"objective": "quantile", "alpha": UPPER_QUANTILE}
PROGRESS = [n for n, name in enumerate(FEATURES) if name not in CONFIDENCES]
ALL = list(range(len(FEATURES)))

Fit = Callable[[Examples, list[int], dict[str, Any]], Grown]


def n_fits() -> int:
    """How many sets of trees `train` grows."""
    return 3 * N_FOLDS + 2


def train(
    runs: Sequence[Sequence[RecordedStep]], *, told: Callable[[], None] = lambda: None
) -> StepModel:
    """A predictor from the complete ones of `runs`; `told` is called after each of `n_fits` fits.

    Raises PredictorError for runs of several models, and for too few prompts.
    """
    complete = [run for run in runs if is_complete(run)]
    model_id = _model_id(complete)
    examples = examples_of(complete)
    if not examples.is_running.any():
        raise PredictorError(
            "none of these runs has a second step, so there is nothing to predict; record longer "
            "outputs"
        )
    sets = _folds(examples)

    def fit(training: Examples, columns: list[int], objective: dict[str, Any]) -> Grown:
        grown = _grow(training, columns, objective)
        told()
        return grown

    held_out = _hold_out(examples, sets, fit)
    info = _describe(model_id, complete, examples, held_out)
    median, upper = fit(examples, ALL, MEDIAN), fit(examples, ALL, UPPER)
    return StepModel(info=info, median=median.trees(), upper=upper.trees())


def without_confidences(model: StepModel, runs: Sequence[Sequence[RecordedStep]]) -> StepModel:
    """The variant `progress` of a model from the same runs: it does not look at confidences. For
    comparison; what the model says of itself stays as it is."""
    examples = examples_of(runs)
    return msgspec.structs.replace(
        model,
        median=_grow(examples, PROGRESS, MEDIAN).trees(),
        upper=_grow(examples, PROGRESS, UPPER).trees(),
    )


def _grow(training: Examples, columns: list[int], objective: dict[str, Any]) -> Grown:
    return grow(
        training.features,
        training.steps_left / training.n_output,
        training.n_output,  # so that an error counts in steps, whatever the length
        columns=columns,
        parameters=TREES | objective,
        n_trees=N_TREES,
    )


def _hold_out(examples: Examples, sets: Sequence[Booleans], fit: Fit) -> dict[str, Floats]:
    """Predictions of every state by trees that did not see its prompt, by variant."""
    variants = ("one_shot", "progress", "full", "upper")
    predicted = {variant: np.empty(len(examples)) for variant in variants}
    for held_out in sets:
        training, asked = examples.where(~held_out), examples.where(held_out)
        predicted["one_shot"][held_out] = one_shot(training, asked)
        for variant, columns, objective in (
            ("progress", PROGRESS, MEDIAN),
            ("full", ALL, MEDIAN),
            ("upper", ALL, UPPER),
        ):
            share = fit(training, columns, objective).evaluate(asked.features)
            predicted[variant][held_out] = np.maximum(share * asked.n_output, FEWEST_STEPS)
    predicted["upper"] = np.maximum(predicted["upper"], predicted["full"])
    return predicted


def _describe(
    model_id: str,
    runs: Sequence[Sequence[RecordedStep]],
    examples: Examples,
    predicted: dict[str, Floats],
) -> ModelInfo:
    curve = granularity(examples, predicted["full"])
    asked, truth = examples.is_running, examples.steps_left
    return ModelInfo(
        model_id=model_id,
        thresholds=sorted(set(examples.thresholds.tolist())),
        n_prompts=len(set(examples.prompt.tolist())),
        n_runs=len(runs),
        n_switching_runs=sum(settled_from(run) > 0 for run in runs),
        n_rows=len(examples),
        upper_quantile=UPPER_QUANTILE,
        n_folds=N_FOLDS,
        errors={
            variant: Error(
                wmape=wmape(predicted[variant][asked], truth[asked]),
                wmape_at_arrival=wmape(predicted[variant][~asked], truth[~asked]),
            )
            for variant in ("one_shot", "progress", "full")
        },
        upper_coverage=float((truth <= predicted["upper"])[asked].mean()),
        refresh_tokens=coarsest(curve),
        granularity=curve,
        parameters=TREES | {"trees": N_TREES},
        lightgbm=library_version(),
    )


def _model_id(runs: Sequence[Sequence[RecordedStep]]) -> str:
    model_ids = sorted({run[0].model_id for run in runs})
    if len(model_ids) == 1:
        return model_ids[0]
    if not model_ids:
        raise PredictorError(
            "no run is there from its first step to its last; let `dilaserve record` finish some"
        )
    raise PredictorError(
        f"steps of {', '.join(model_ids)}: a predictor is trained for one model; give files of "
        "`dilaserve record` with runs of one of them alone"
    )


def _folds(examples: Examples) -> list[Booleans]:
    n_prompts = len(set(examples.prompt.tolist()))
    if n_prompts < 2 * N_FOLDS:
        raise PredictorError(
            f"runs of {n_prompts} prompts cannot be split into {N_FOLDS} parts; record at least "
            f"{2 * N_FOLDS} prompts, better 100"
        )
    return folds(examples, N_FOLDS, SEED)
