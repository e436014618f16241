"""What a threshold costs and saves (the paper's Figure 3), measured with the bundled model: fixed
thresholds, and a high and a low one mixed step by step.

Held-out problems with answers that can be checked, the serving engine, the dual cache. The model is
not LLaDA and the problems are not GSM8K's: only the shape can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from matplotlib.figure import Figure

from dilaserve.model_folder import find_model
from dilaserve_bench.data.ablations import ablations
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number, percent
from dilaserve_bench.experiments.plots import colour, panels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dilaserve_bench.tiny.evaluate import Case, ThresholdOf
    from dilaserve_gpu_worker.models.model import Model

    Loaded = tuple[Model, PreTrainedTokenizerFast, list[Case]]

__all__ = ["FIGURE_3", "TradeoffRow", "mixed_threshold"]

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
HIGH, LOW = 0.9, 0.6
OURS, THEIRS = colour("dilaserve"), colour("tediserve")
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BY_CHANCE = f"Each step at {HIGH} or at {LOW}, by chance"
N_PER_TASK, QUICK_PER_TASK = 102, 2
N_TASKS = 6
PROBLEM_SEED = 2026


class _Key(msgspec.Struct, frozen=True):
    n_per_task: int
    threshold: float | None
    share: float | None


class TradeoffRow(msgspec.Struct, frozen=True, kw_only=True):
    """All problems at one threshold, or at one mixture."""

    variant: str
    """fixed or mixed."""
    threshold: float | None
    """None where it is mixed."""
    share_of_high: float | None
    """Of the steps; the others are at the low one. None where it is fixed."""
    accuracy: float
    ci95: float
    """Half of Wilson's interval."""
    mean_steps: float
    n: int


def run(session: Session) -> Document[TradeoffRow]:
    """Fixed thresholds, then mixtures, all with the same problems."""
    n_per_task = session.size(N_PER_TASK, QUICK_PER_TASK)
    measure = _Measure(find_model(None, session.environ), n_per_task)
    wanted: list[tuple[float | None, float | None]] = [
        *((threshold, None) for threshold in THRESHOLDS),
        *((None, share) for share in SHARES),
    ]
    session.watch.expect(len(wanted))
    rows = []
    for threshold, share in wanted:
        key = _Key(n_per_task, threshold, share)
        row = session.measured(key, TradeoffRow, partial(measure, threshold, share))
        if row is not None:
            rows.append(row)
    return session.document("fig3", rows, n=N_TASKS * n_per_task, published=ablations().tradeoff)


def mixed_threshold(share: float, case: int, step: int) -> float:
    """The high one for this share of all steps, by chance, the same at every time."""
    return HIGH if random.Random(f"{case}/{step}").random() < share else LOW


def page(document: Document[TradeoffRow]) -> Page:
    """Accuracy and steps, and what they cost and save against 0.9; the published beside them."""
    theirs = ablations().tradeoff
    of = {v: [r for r in document.rows if r.variant == v] for v in ("fixed", "mixed")}
    fixed = _published(theirs.thresholds, theirs.accuracy, theirs.mean_steps)
    mixed = _published(theirs.share_of_high, theirs.mixed_accuracy, theirs.mixed_mean_steps)
    return Page(
        [
            _table("Fixed threshold", "threshold", of["fixed"], fixed),
            _table(BY_CHANCE, f"share of {HIGH}", of["mixed"], mixed),
        ],
        [
            f"{document.n} problems. Lost: points of accuracy, saved: steps, both against {HIGH} "
            "throughout."
        ],
    )


def draw(document: Document[TradeoffRow]) -> Figure:
    """Accuracy against steps, ours and published, each relative to its own at 0.9."""
    theirs = ablations().tradeoff
    figure, (ours_axes, theirs_axes) = panels(["the bundled model", "LLaDA-8B (published)"])
    for variant, style in (("fixed", "o-"), ("mixed", "s--")):
        rows = [row for row in document.rows if row.variant == variant]
        line = [(row.mean_steps, 100 * row.accuracy) for row in rows]
        if line:
            ours_axes.plot(*zip(*line, strict=True), style, color=OURS, label=variant)
    for steps, accuracy, style in (
        (theirs.mean_steps, theirs.accuracy, "o-"),
        (theirs.mixed_mean_steps, theirs.mixed_accuracy, "s--"),
    ):
        theirs_axes.plot(steps, [100 * a for a in accuracy], style, color=THEIRS)
    for axes in (ours_axes, theirs_axes):
        axes.set_xlabel("mean denoising steps")
    ours_axes.set_ylabel("accuracy in %")
    ours_axes.legend(fontsize=8)
    return figure


FIGURE_3 = Experiment(
    name="fig3",
    what="accuracy and steps by threshold, fixed and mixed, measured with the bundled model",
    paper="Figure 3",
    row=TradeoffRow,
    run=run,
    page=page,
    draw=draw,
    n_seeds=1,
)


class _Measure:
    """Denoises problems and checks the answers; the model is loaded when it is first needed."""

    def __init__(self, folder: Path, n_per_task: int) -> None:
        self._folder = folder
        self._n_per_task = n_per_task
        self._loaded: Loaded | None = None

    def __call__(self, threshold: float | None, share: float | None) -> TradeoffRow:
        from dilaserve_bench.tiny.evaluate import solve, wilson_interval

        model, tokenizer, cases = self._load()
        solved = solve(model, tokenizer, cases, "dual", _chooser(threshold, share))
        n_right = sum(is_right for is_right, _ in solved)
        low, high = wilson_interval(n_right, len(solved))
        return TradeoffRow(
            variant="mixed" if threshold is None else "fixed",
            threshold=threshold,
            share_of_high=share,
            accuracy=round(n_right / len(solved), DIGITS),
            ci95=round((high - low) / 2, DIGITS),
            mean_steps=round(sum(n_steps for _, n_steps in solved) / len(solved), DIGITS),
            n=len(solved),
        )

    def _load(self) -> Loaded:
        import torch
        from transformers import PreTrainedTokenizerFast

        from dilaserve_bench.tiny.evaluate import held_out_cases
        from dilaserve_bench.tiny.tasks import TASKS
        from dilaserve_gpu_worker.weights import load_model

        if self._loaded is None:
            torch.set_num_threads(1)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self._folder)
            cases = held_out_cases(tokenizer, list(TASKS), self._n_per_task, PROBLEM_SEED)
            self._loaded = load_model(self._folder), tokenizer, cases
        return self._loaded


def _chooser(threshold: float | None, share: float | None) -> ThresholdOf:
    if threshold is not None:
        return lambda _case, _step: threshold
    assert share is not None
    return lambda case, step: mixed_threshold(share, case, step)


Savings = tuple[float, float]
"""Accuracy lost in points, and the share of steps saved, against 0.9 throughout."""


def _savings(accuracy: float, steps: float, full: tuple[float, float]) -> Savings:
    return 100 * (full[0] - accuracy), 1 - steps / full[1]


def _published(
    at: Sequence[float], accuracies: Sequence[float], steps: Sequence[float]
) -> dict[float, Savings]:
    points = list(zip(accuracies, steps, strict=True))
    full = max(points, key=lambda point: point[1])
    return {x: _savings(*point, full) for x, point in zip(at, points, strict=True)}


def _table(
    title: str, label: str, rows: Sequence[TradeoffRow], published: Mapping[float, Savings]
) -> Table:
    head = ("accuracy", "±", "steps", "lost", "saved", "published lost", "published saved")
    full = next(((r.accuracy, r.mean_steps) for r in rows if _at(r) in (HIGH, 1.0)), None)
    lines = []
    for row in rows:
        ours = _savings(row.accuracy, row.mean_steps, full) if full is not None else None
        lines.append(
            [
                f"{_at(row):g}",
                percent(row.accuracy),
                number(100 * row.ci95, 1),
                number(row.mean_steps, 2),
                *_cells(ours),
                *_cells(published.get(_at(row))),
            ]
        )
    return Table((label, *head), lines, title=title)


def _at(row: TradeoffRow) -> float:
    at = row.threshold if row.share_of_high is None else row.share_of_high
    assert at is not None
    return at


def _cells(savings: Savings | None) -> tuple[str, str]:
    return ("", "") if savings is None else (f"{savings[0]:.1f}", percent(savings[1], 0))
