"""Recorded runs → training examples, and how they are split. Knows no model.

What is asked online is: how many steps are left if from now on the request ran at threshold γ,
whatever it was run with so far? A run answers that for the states from which on its threshold did
not change any more: for a run at one threshold all of them, the one before its first step
included; for a run that switched, those since its last switch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dilaserve.messages import StepQuestion
from dilaserve.recording import RecordedStep, is_complete
from dilaserve_predictor.features import (
    FULL_UNMASK_PROGRESS,
    THRESHOLD,
    Floats,
    feature_matrix,
    state_after,
    state_before,
)

__all__ = ["Booleans", "Examples", "examples_of", "folds", "settled_from"]

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Examples:
    """N states, each with the threshold kept from there on, and what came of it."""

    features: Floats
    """(N, 11)."""
    steps_left: Floats
    n_output: Floats
    step: Integers
    """Steps run; 0 for a state before the first."""
    run: Integers
    """Which run a state is of; the states of a run are in order, one behind the other."""
    prompt: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.steps_left)

    @property
    def thresholds(self) -> Floats:
        """The one kept from there on, by state."""
        column: Floats = self.features[:, THRESHOLD]
        return column

    @property
    def n_unmasked(self) -> Integers:
        """Output tokens unmasked, by state."""
        return np.rint(self.features[:, FULL_UNMASK_PROGRESS] * self.n_output).astype(np.int64)

    @property
    def is_running(self) -> Booleans:
        """States after a first step: those that are asked about online."""
        return self.step > 0

    def where(self, chosen: Booleans) -> Examples:
        """Some of the states."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name)[chosen] for f in fields(self)}
        return Examples(**columns)


def examples_of(runs: Iterable[Sequence[RecordedStep]]) -> Examples:
    """All states of complete runs that tell something; at the end of a run nobody asks."""
    states: list[StepQuestion] = []
    known: list[tuple[float, int, int, str]] = []
    for number, run in enumerate(filter(is_complete, runs)):
        for done in range(settled_from(run), len(run)):
            states.append(state_after(run[done - 1]) if done else state_before(run))
            known.append((run[-1].threshold, len(run) - done, number, run[0].prompt_id))
    threshold, left, run_of, prompt = zip(*known, strict=True) if known else ((), (), (), ())
    features = feature_matrix(states, [0.0])
    features[:, THRESHOLD] = threshold
    return Examples(
        features=features,
        steps_left=np.array(left, dtype=np.float64),
        n_output=np.array([state.n_output for state in states], dtype=np.float64),
        step=np.array([state.step for state in states], dtype=np.int64),
        run=np.array(run_of, dtype=np.int64),
        prompt=np.array(prompt, dtype=np.str_),
    )


def settled_from(run: Sequence[RecordedStep]) -> int:
    """Number of steps after which a run kept its threshold to the end; 0 if it always did."""
    done = len(run)
    while done and run[done - 1].threshold == run[-1].threshold:
        done -= 1
    return done


def folds(examples: Examples, n: int, seed: int) -> list[Booleans]:
    """`n` disjoint sets of states that together are all of them, no prompt in two of them."""
    prompts = sorted(set(examples.prompt.tolist()))
    random.Random(seed).shuffle(prompts)
    fold_of = {prompt: index % n for index, prompt in enumerate(prompts)}
    fold = np.array([fold_of[prompt] for prompt in examples.prompt.tolist()], dtype=np.int64)
    return [fold == index for index in range(n)]
