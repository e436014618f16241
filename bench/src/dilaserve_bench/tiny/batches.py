"""Training batches of the tiny model: problems, canvas lengths and masks.

Knows the layout and the mask patterns, but neither model nor optimiser.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilaserve_bench.tiny.layout import (
    BLOCK_LENGTH,
    DATA_WIDTH,
    MASK,
    canvas_tokens,
    prompt_tokens,
    vocabulary,
)
from dilaserve_bench.tiny.tasks import ASKED, LONG_CHAINS, SERVED, TASKS, Difficulty, Problem

CANVAS_LENGTHS = (32, 64, 96)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stretch of the training draws: shares of tasks and canvas lengths, of layouts without
    padding, and of answers that fill their canvas."""

    last_step: float
    tasks: dict[str, float]
    canvases: tuple[float, float, float]
    compact: float
    full_length: float
    difficulty: Difficulty


_LEARN = {"total": 0.27, "walk": 0.27, "add": 0.16, "fill": 0.16, "shift": 0.08, "echo": 0.06}
_SERVE = {"total": 0.22, "walk": 0.22, "add": 0.20, "fill": 0.14, "shift": 0.11, "echo": 0.11}
_FINISH = {"total": 0.17, "walk": 0.18, "add": 0.28, "fill": 0.06, "shift": 0.2, "echo": 0.11}
_POLISH = {"total": 0.22, "walk": 0.16, "add": 0.2, "fill": 0.08, "shift": 0.2, "echo": 0.14}
# One block first, then all lengths; long chains first, then the mix that is served; last, most
# of what was learned least, and answers shorter than their canvas, as people ask for.
STAGES = (
    Stage(1500, _LEARN, (1.0, 0.0, 0.0), 0.9, 0.75, LONG_CHAINS),
    Stage(5000, _LEARN, (0.4, 0.3, 0.3), 0.5, 0.75, LONG_CHAINS),
    Stage(6250, _SERVE, (0.4, 0.3, 0.3), 0.7, 0.75, SERVED),
    Stage(8000, _FINISH, (0.4, 0.3, 0.3), 0.7, 0.75, SERVED),
    Stage(math.inf, _POLISH, (0.3, 0.3, 0.4), 0.4, 0.4, ASKED),
)


def stage_at(step: int) -> Stage:
    """The stage that `step` belongs to."""
    return next(stage for stage in STAGES if step < stage.last_step)


def batch_shape(step: int, seed: int) -> tuple[int, int]:
    """Canvas length and data width of a step, the same on every rank."""
    rng, stage = np.random.default_rng([3, seed, step]), stage_at(step)
    canvas_length = int(rng.choice(CANVAS_LENGTHS, p=stage.canvases))
    return canvas_length, canvas_length if rng.random() < stage.compact else DATA_WIDTH


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids (B, L) with masks in the canvas, positions (L,), targets and weights (B, C)."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def canvas_start(self) -> int:
        return self.ids.shape[1] - self.targets.shape[1]


def training_batch(
    rng: np.random.Generator,
    stage: Stage,
    canvas_length: int,
    data_width: int,
    n_tokens: int,
    weight_limit: float,
) -> Batch:
    """A batch of about `n_tokens` tokens.

    With a `data_width` below the layout's the padding beyond it is left out, and the positions
    behind it stay what they are in the full layout: half the work while distances are learned.
    """
    length = data_width + 4 + canvas_length
    problems = [_problem(rng, stage, canvas_length) for _ in range(max(1, n_tokens // length))]
    prompts = np.array([_prompt_ids(problem, data_width) for problem in problems])
    targets = np.array([_canvas_ids(problem, canvas_length) for problem in problems])
    masked, weights = mask_canvases(rng, len(problems), canvas_length, weight_limit)
    canvases = np.where(masked, vocabulary()[MASK], targets)
    return Batch(
        ids=torch.from_numpy(np.concatenate([prompts, canvases], 1)),
        positions=torch.from_numpy(_positions(data_width, canvas_length)),
        targets=torch.from_numpy(targets),
        weights=torch.from_numpy(weights.astype(np.float32)),
    )


def _problem(rng: np.random.Generator, stage: Stage, canvas_length: int) -> Problem:
    task = rng.choice(list(stage.tasks), p=list(stage.tasks.values()))
    length = canvas_length
    if rng.random() > stage.full_length:
        unit = BLOCK_LENGTH if task == "add" else 2
        least = 1 if task == "add" else 2
        length = unit * int(rng.integers(least, canvas_length // unit + 1))
    return TASKS[str(task)].generate(rng, length, stage.difficulty)


def _prompt_ids(problem: Problem, data_width: int) -> list[int]:
    ids = vocabulary_ids(prompt_tokens(problem.task, problem.parameter, problem.data))
    return ids[: 3 + data_width] + ids[3 + DATA_WIDTH :]


def _canvas_ids(problem: Problem, canvas_length: int) -> list[int]:
    return vocabulary_ids(canvas_tokens(problem.answer, canvas_length))


def vocabulary_ids(tokens: list[str]) -> list[int]:
    """Ids of known tokens."""
    ids = vocabulary()
    return [ids[token] for token in tokens]


def _positions(data_width: int, canvas_length: int) -> NDArray[np.int64]:
    canvas = np.arange(3 + DATA_WIDTH, 4 + DATA_WIDTH + canvas_length)
    return np.concatenate([np.arange(3 + data_width), canvas])


def mask_canvases(
    rng: np.random.Generator, n_canvases: int, canvas_length: int, weight_limit: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Masks and loss weights (B, C).

    Even rows: LLaDA's loss, every token masked with probability t, weight 1/t. Odd rows: a state
    of block-wise decoding, with earlier blocks clean, later ones masked and without loss, and the
    block itself masked at random with probability t or from a random place on.
    """
    masked = np.zeros((n_canvases, canvas_length), bool)
    weights = np.zeros((n_canvases, canvas_length))
    offsets = (np.arange(n_canvases) + rng.random()) / n_canvases
    for row, t in enumerate(rng.permutation(offsets)):
        ratio = max(t, 1 / BLOCK_LENGTH)
        region = slice(0, canvas_length)
        if row % 2:
            start = BLOCK_LENGTH * int(rng.integers(canvas_length // BLOCK_LENGTH))
            region = slice(start, start + BLOCK_LENGTH)
            masked[row, start + BLOCK_LENGTH :] = True
        width = region.stop - region.start
        if row % 4 == 3:
            masked[row, region] = np.arange(width) >= round((1 - ratio) * width)
        else:
            masked[row, region] = rng.random(width) < ratio
        weights[row, region] = masked[row, region] * min(1 / ratio, weight_limit) / width
    return masked, weights
