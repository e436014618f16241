"""What the step predictor is worth (the paper's Figures 6 and 7), measured with the bundled model.

Its errors on prompts that were held out: an estimate made once at arrival, progress alone, and the
confidences, too; how they grow when it is asked less often; how long it takes; and what each of the
three does for the policy, in the twin, with the model in the loop and other prompts than those
that it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from matplotlib.figure import Figure

from dilaserve.model_folder import find_model
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, interval, number, percent
from dilaserve_bench.experiments.plots import panels
from dilaserve_bench.experiments.predicted import ServedRow, Variants, serve
from dilaserve_bench.twin.report import estimate
from dilaserve_predictor.evaluate import coarsest, steps_per_token
from dilaserve_predictor.examples import examples_of
from dilaserve_predictor.features import state_after
from dilaserve_predictor.model import Predictor, StepModel
from dilaserve_predictor.train import train, without_confidences

if TYPE_CHECKING:
    from dilaserve.recording import RecordedStep

__all__ = ["EXPERIMENT", "PredictorRow"]

VARIANTS = ("one_shot", "progress", "full")
PUBLISHED = {"one_shot": 0.750, "progress": 0.352, "full": 0.193}
"""WMAPE of LLaDA-8B on GSM8K: the paper, Figure 6."""
ALLOWED = {"progress": 0.6, "one_shot": 0.35}
"""Most that the error of `full` may be of the others'; published 0.55 and 0.26."""
N_PER_TASK, QUICK_PER_TASK = 40, 2
"""240 prompts, 48 of them held out at a time; the paper trained with 100."""
N_TASKS = 6
FIRST_PROBLEM_SEED = 100
RATES = (4.0, 6.0, 8.0)
QUICK_RATES = (6.0,)
N_REQUESTS, QUICK_REQUESTS = 300, 30
N_ASKED, N_CANDIDATES = 64, 5
N_TIMES = 400

Runs = list[list["RecordedStep"]]


class PredictorRow(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds: each has prompts of its own, every one of them held out once."""

    variant: str
    wmape: float
    """After steps: sum of absolute errors over sum of the steps left."""
    ci95: float | None
    wmape_at_arrival: float
    """Before the first step, when nobody knows more than threshold and length."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed's recorded runs gave."""

    wmape: dict[str, float]
    wmape_at_arrival: dict[str, float]
    granularity: list[tuple[int, float]]
    upper_coverage: float
    n_runs: int
    n_switching_runs: int
    n_rows: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a whole prediction, median and upper quantile, features included."""

    p50_ms: float
    p99_ms: float


def run(session: Session) -> Document[PredictorRow]:
    """Errors, latency and granularity by seed, then the twin."""
    bench = _Bench(session)
    rates = session.options.rates or (QUICK_RATES if session.is_quick else RATES)
    session.watch.expect(len(session.seeds) + 1 + len(rates) * len(VARIANTS) * len(session.seeds))
    measured = [each for seed in session.seeds if (each := bench.errors(seed)) is not None]
    latency = bench.latency()
    served = bench.served(rates)
    rows = [row for variant in VARIANTS if (row := _row(variant, measured)) is not None]
    return session.document(
        "predictor",
        rows,
        n=N_TASKS * bench.n_per_task,
        published={"wmape": PUBLISHED},
        found={
            **_ratios(rows),
            **_curve(measured),
            "upper_coverage": _mean([each.upper_coverage for each in measured]),
            "runs": sum(each.n_runs for each in measured),
            "switching_runs": sum(each.n_switching_runs for each in measured),
            "states": sum(each.n_rows for each in measured),
            "latency": msgspec.to_builtins(latency),
            "served": msgspec.to_builtins(served),
        },
    )


class _Bench:
    """Records, trains and asks; the model is loaded when it is first needed."""

    def __init__(self, session: Session) -> None:
        self.n_per_task = session.size(N_PER_TASK, QUICK_PER_TASK)
        self._session = session
        self._folder = find_model(None, session.environ)
        self._runs: Runs | None = None
        self._variants: Variants | None = None

    def errors(self, seed: int) -> Measured | None:
        """Of predictors trained on this seed's prompts."""
        key = {"measure": "errors", "n_per_task": self.n_per_task, "seed": seed}
        return self._session.measured(key, Measured, lambda: _errors(self._record(seed)))

    def latency(self) -> Latency | None:
        """64 requests under 5 candidates; this machine's, now."""
        key = {"measure": "latency", "n_per_task": self.n_per_task}
        return self._session.measured(key, Latency, lambda: _latency(self._first_runs()))

    def served(self, rates: Sequence[float]) -> list[ServedRow]:
        """Every variant at every rate."""
        n_requests = self._session.size(N_REQUESTS, QUICK_REQUESTS)
        return serve(self._session, self._folder, self._train, rates, n_requests)

    def _train(self) -> Variants:
        if self._variants is None:
            runs = self._first_runs()
            model = train(runs)
            self._variants = Variants(
                full=Predictor(model),
                progress=Predictor(without_confidences(model, runs)),
                steps_per_token=steps_per_token(examples_of(runs)),
                upper=_one_shot_upper(runs, model),
            )
        return self._variants

    def _first_runs(self) -> Runs:
        if self._runs is None:
            self._runs = self._record(self._session.seeds[0])
        return self._runs

    def _record(self, seed: int) -> Runs:
        return record_problems(self._folder, self.n_per_task, FIRST_PROBLEM_SEED + seed)


def record_problems(folder: Path, n_per_task: int, seed: int) -> Runs:
    """Runs of held-out problems of all tasks at every threshold, and switching ones."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from dilaserve_bench.tiny.evaluate import held_out_cases
    from dilaserve_bench.tiny.record import plan_runs, record
    from dilaserve_bench.tiny.tasks import TASKS
    from dilaserve_gpu_worker.weights import load_model

    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    cases = held_out_cases(tokenizer, list(TASKS), n_per_task, seed)
    return list(record(load_model(folder), folder.name, plan_runs(cases, seed)))


def _errors(runs: Runs) -> Measured:
    info = train(runs).info
    return Measured(
        wmape={variant: info.errors[variant].wmape for variant in VARIANTS},
        wmape_at_arrival={variant: info.errors[variant].wmape_at_arrival for variant in VARIANTS},
        granularity=info.granularity,
        upper_coverage=info.upper_coverage,
        n_runs=info.n_runs,
        n_switching_runs=info.n_switching_runs,
        n_rows=info.n_rows,
    )


def _latency(runs: Runs) -> Latency:
    predictor = Predictor(train(runs))
    states = [state_after(run[len(run) // 2]) for run in (runs * N_ASKED)[:N_ASKED]]
    candidates = predictor.info.thresholds[:N_CANDIDATES]
    seconds = [_seconds(partial(predictor.predict, states, candidates)) for _ in range(N_TIMES)]
    p50, p99 = np.quantile(seconds, [0.5, 0.99]).tolist()
    return Latency(p50_ms=round(1000 * p50, 3), p99_ms=round(1000 * p99, 3))


def _seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def _one_shot_upper(runs: Runs, model: StepModel) -> float:
    """The upper quantile of the truth, as a multiple of the estimate."""
    examples = examples_of(runs)
    arrivals = examples.where(~examples.is_running)
    means = steps_per_token(examples)
    estimate_of = np.array([means[each] for each in arrivals.thresholds.tolist()])
    ratio = arrivals.steps_left / (estimate_of * arrivals.n_output)
    return float(np.quantile(ratio, model.info.upper_quantile))


def _row(variant: str, measured: Sequence[Measured]) -> PredictorRow | None:
    wmape = estimate(each.wmape[variant] for each in measured)
    at_arrival = estimate(each.wmape_at_arrival[variant] for each in measured)
    if wmape is None or at_arrival is None:
        return None
    return PredictorRow(
        variant=variant,
        wmape=round(wmape.mean, DIGITS),
        ci95=None if wmape.ci95 is None else round(wmape.ci95, DIGITS),
        wmape_at_arrival=round(at_arrival.mean, DIGITS),
    )


def _ratios(rows: Sequence[PredictorRow]) -> dict[str, float]:
    wmape = {row.variant: row.wmape for row in rows}
    return {
        f"full_to_{other}": round(wmape["full"] / wmape[other], 4) for other in ALLOWED if wmape
    }


def _curve(measured: Sequence[Measured]) -> dict[str, object]:
    """Mean error by newly unmasked tokens between two predictions, and the paper's choice."""
    by_size: dict[int, list[float]] = {}
    for each in measured:
        for size, error in each.granularity:
            by_size.setdefault(size, []).append(error)
    curve = [(size, round(sum(errors) / len(errors), DIGITS)) for size, errors in by_size.items()]
    return {"granularity": curve, "refresh_tokens": coarsest(curve) if curve else None}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), DIGITS) if values else None


def page(document: Document[PredictorRow]) -> Page:
    """Three tables and what follows from them."""
    found = document.found
    errors = [
        [
            row.variant,
            interval(row.wmape, row.ci95),
            number(PUBLISHED.get(row.variant)),
            number(row.wmape_at_arrival),
        ]
        for row in document.rows
    ]
    curve = [[str(size), number(error)] for size, error in found["granularity"]]
    served = [
        [
            row.variant,
            f"{row.rate:g}",
            interval(row.attainment, row.ci95),
            number(row.mean_threshold),
            percent(row.accuracy),
            number(row.p99_s, 2),
        ]
        for row in msgspec.convert(found["served"], list[ServedRow])
    ]
    return Page(
        [
            Table(("variant", "WMAPE", "published", "before the first step"), errors),
            Table(("tokens", "WMAPE"), curve, title="Newly unmasked tokens between predictions"),
            Table(
                ("variant", "rate", "attainment", "threshold", "accuracy", "p99 s"),
                served,
                title="The policy dilaserve with each of them, the model in the loop",
            ),
        ],
        _notes(document),
    )


def _notes(document: Document[PredictorRow]) -> list[str]:
    found = document.found
    notes = [
        f"full / {other}: {found[f'full_to_{other}']:.2f} (wanted: at most {most}; published "
        f"{PUBLISHED['full'] / PUBLISHED[other]:.2f})"
        for other, most in ALLOWED.items()
        if f"full_to_{other}" in found
    ]
    if found["latency"]:
        latency = found["latency"]
        notes.append(
            f"{N_ASKED} requests under {N_CANDIDATES} candidates: {latency['p50_ms']:.2f} ms, p99 "
            f"{latency['p99_ms']:.2f} ms, median and upper quantile together"
        )
    if found["refresh_tokens"] is not None:
        notes.append(
            f"Largest granularity within 5 % of the finest: {found['refresh_tokens']} tokens"
        )
    return notes


def draw(document: Document[PredictorRow]) -> Figure:
    """Figure 6 and Figure 7."""
    figure, (errors, curve) = panels(["error by what is known", "error by how often it is asked"])
    at = np.arange(len(document.rows))
    ours = [row.wmape for row in document.rows]
    errors.bar(at - 0.2, ours, 0.4, label="the bundled model", color="#d62728")
    published = [PUBLISHED[row.variant] for row in document.rows]
    errors.bar(at + 0.2, published, 0.4, label="LLaDA-8B (published)", color="#1f77b4")
    errors.set_xticks(at, [row.variant for row in document.rows])
    errors.set_ylabel("WMAPE")
    errors.legend(fontsize=8)
    if document.found["granularity"]:
        curve.plot(*zip(*document.found["granularity"], strict=True), "o-", color="#d62728")
    curve.set_xscale("log", base=2)
    curve.set_xlabel("newly unmasked tokens between two predictions")
    return figure


EXPERIMENT = Experiment(
    name="predictor",
    what="errors of the step predictor, how often to ask it, and what it does for the policy",
    paper="Figures 6 and 7",
    row=PredictorRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"rates"}),
    n_seeds=4,
)
