"""Quality, measured: the tiny model denoises every request in the twin, and answers are checked.

Every policy gets the same problems at the same times. The cluster is scaled to the model: it has
steps and blocks in proportion, so a pass lasts longer and an instance has room for as many requests
as one has of GSM8K.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import process_time

import msgspec
from matplotlib.figure import Figure

from dilaserve.model_folder import find_model
from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.gsm8k import FIXED
from dilaserve_bench.experiments.page import Page, Table, number, percent
from dilaserve_bench.experiments.paired import Difference, mean_of, paired, paired_excess
from dilaserve_bench.experiments.plots import colour, panels
from dilaserve_bench.twin.advice import trained_in
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import NOBODY_REFUSED, core_settings
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import PolicyOptions, build_policy

__all__ = ["EXPERIMENT", "QualityRow"]

INSTANCES = "4xtp1"
N_PER_TASK = 800
"""Of six tasks: as many problems as requests, each posed once."""
QUICK_PER_TASK = 10
RATE = 4.0
"""Where INFaaS falls below half."""
OVERHEAD = 8 * 1.594
"""The calibrated overhead, and one step for eight of LLaDA's: the mean request takes a second by
itself, the longest (a row of 96 colours) five."""
BUDGET = 1024
"""Six requests of the mean length, as 8,192 tokens hold of GSM8K's."""
SLO_S = 9.5
PROBLEM_SEED = 2026
BEST, WORST = "infaas", f"{FIXED}0.7"
POLICIES = (BEST, WORST, "tediserve", "dilaserve")
HALF = 0.5


class QualityRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. Shares of 1."""

    policy: str
    rate: float
    """Arrivals a second, per GPU."""
    attainment: float
    ci95: float | None = None
    """None: requests of one run depend on one another."""
    mean_threshold: float | None
    accuracy: float
    """Of all requests: all were answered, if late."""
    accuracy_ci95: float
    p50_s: float | None
    p99_s: float | None
    cpu_s: float
    lost: float | None
    """Accuracy lost against a fixed 0.9 (`infaas`), on the same problems; None without it."""
    lost_ci95: float | None
    beyond_half: float | None
    """By how much `lost` exceeds half of what a fixed 0.7 loses: at most 0 is the aim."""
    beyond_half_ci95: float | None


class QualityRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one run. `right`: "1" or "0" for each request, in order of arrival."""

    attainment: float
    mean_threshold: float | None
    p50_s: float | None
    p99_s: float | None
    right: str
    cpu_s: float


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on."""

    policy: str
    rate: float
    overhead: float
    n_per_task: int
    seed: int = 0


def run(session: Session) -> Document[QualityRow]:
    """One run for each policy and rate."""
    rates = session.options.rates or (RATE,)
    overhead = session.options.overhead or OVERHEAD
    n_per_task = session.size(N_PER_TASK, QUICK_PER_TASK)
    folder = find_model(None, session.environ)
    rows: list[QualityRow] = []
    for rate in rates:
        keys = [
            _Key(policy=policy, rate=rate, overhead=overhead, n_per_task=n_per_task)
            for policy in session.options.policies or POLICIES
        ]
        session.measure_together(keys, QualityRun, partial(_alone, folder))
        runs = [
            session.measured(key, QualityRun, partial(_watched, folder, key, session))
            for key in keys
        ]
        kept = {key.policy: done for key, done in zip(keys, runs, strict=True) if done is not None}
        rows += rows_of(rate, kept)
    found = {"overhead": overhead, "slo_s": SLO_S, "instances": INSTANCES, "budget": BUDGET}
    return session.document("quality", rows, n=6 * n_per_task, found=found)


def rows_of(rate: float, runs: Mapping[str, QualityRun]) -> list[QualityRow]:
    """Rows at one rate, each compared with those of the fixed thresholds that are there."""
    right = {policy: [each == "1" for each in done.right] for policy, done in runs.items()}
    rows = []
    for policy, done in runs.items():
        ours = right[policy]
        accuracy = mean_of([float(each) for each in ours])
        lost = paired(right[BEST], ours) if BEST in right else None
        beyond = None
        if BEST in right and WORST in right:
            beyond = paired_excess(right[BEST], ours, right[WORST], share=HALF)
        rows.append(
            QualityRow(
                policy=policy,
                rate=rate,
                attainment=done.attainment,
                mean_threshold=done.mean_threshold,
                accuracy=accuracy.mean,
                accuracy_ci95=accuracy.ci95,
                p50_s=done.p50_s,
                p99_s=done.p99_s,
                cpu_s=done.cpu_s,
                lost=_mean(lost),
                lost_ci95=_ci95(lost),
                beyond_half=_mean(beyond),
                beyond_half_ci95=_ci95(beyond),
            )
        )
    return rows


# --- one run --------------------------------------------------------------------------------------


def _watched(folder: Path, key: _Key, session: Session) -> QualityRun | None:
    simulation = _simulation(folder, key)
    with session.watch.follow(simulation, f"{key.policy} at {key.rate:g}/s") as look:
        done = simulation.run(look)
    return _kept(done) if done.is_complete else None


def _alone(folder: Path, key: _Key) -> QualityRun:
    """In a process of its own."""
    return _kept(_simulation(folder, key).run())


def _simulation(folder: Path, key: _Key) -> Simulation:
    from dilaserve_bench.twin.tiny import load_problems

    problems = load_problems(folder, n_per_task=key.n_per_task, seed=PROBLEM_SEED)
    spec = ClusterSpec(
        groups=parse_mix(INSTANCES),
        overhead=key.overhead,
        max_batch_tokens=BUDGET,
        n_kv_tokens=2 * BUDGET,
    )
    trained = trained_in(folder)
    scenario = Scenario(
        cluster=spec,
        profiles=load_profiles(data_file("h100_llada.json")),
        policy=lambda: _policy(key),
        source=problems.source("dual"),
        judge=problems.judge(),
        core=core_settings(spec.heartbeat_s, None),
        adviser=None if trained is None else lambda _: trained,
    )
    workloads = problems.sized(_workloads(key, spec, len(problems.cases)))
    return Simulation(scenario, workloads(key.seed), key.seed, timer=process_time)


def _workloads(key: _Key, spec: ClusterSpec, n_cases: int) -> Workloads:
    any_size = RequestClass(n_prompt=1, n_output=1, slo_s=SLO_S)
    return poisson([any_size], rate=key.rate * spec.n_gpus, n=n_cases, n_cases=n_cases)


def _policy(key: _Key) -> Policy:
    fixed = key.policy.startswith(FIXED)
    usual = PolicyOptions(
        threshold=float(key.policy.removeprefix(FIXED)) if fixed else PolicyOptions().threshold,
        queue_limit=NOBODY_REFUSED,
        slo_s=SLO_S,
        profiles=load_profiles(data_file("h100_llada.json")),
    )
    return build_policy(BEST if fixed else key.policy, usual)


def _kept(done: Run) -> QualityRun:
    report = report_run(done)
    return QualityRun(
        attainment=report.attainment,
        mean_threshold=report.mean_threshold,
        p50_s=report.p50_s,
        p99_s=report.p99_s,
        cpu_s=round(done.wall_s, 1),
        right="".join("1" if served.right else "0" for served in done.served),
    )


def _mean(difference: Difference | None) -> float | None:
    return None if difference is None else difference.mean


def _ci95(difference: Difference | None) -> float | None:
    return None if difference is None else difference.ci95


# --- what it says ---------------------------------------------------------------------------------


def page(document: Document[QualityRow]) -> Page:
    """Attainment and accuracy, and what is lost on the same problems."""
    rows = [
        [
            row.policy, number(row.rate, 2), number(row.attainment), number(row.mean_threshold),
            _percent(row.accuracy, row.accuracy_ci95), _percent(row.lost, row.lost_ci95),
            _percent(row.beyond_half, row.beyond_half_ci95), number(row.p50_s, 2),
            number(row.p99_s, 2),
        ]
        for row in document.rows
    ]  # fmt: skip
    head = ("policy", "rate", "attainment", "threshold", "accuracy", f"lost against {BEST}",
            f"beyond half of {WORST}", "p50 s", "p99 s")  # fmt: skip
    found = document.found
    note = (
        f"{document.n} problems, each posed once to every policy at the same time; "
        f"{found['instances']}, SLO {found['slo_s']} s, {found['budget']} tokens an instance, "
        f"passes {found['overhead']:.2f} times as long as profiled"
    )
    return Page([Table(head, rows)], [note])


def draw(document: Document[QualityRow]) -> Figure:
    """Accuracy against attainment."""
    figure, (axes,) = panels(["answers and deadlines"])
    for number_, row in enumerate(document.rows):
        axes.errorbar(
            row.attainment,
            row.accuracy,
            yerr=row.accuracy_ci95,
            fmt="o",
            color=colour(row.policy, number_),
            label=f"{row.policy} at {row.rate:g}",
        )
    axes.set_xlabel("SLO attainment")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=8)
    return figure


def _percent(value: float | None, ci95: float | None) -> str:
    if value is None or ci95 is None:
        return ""
    return f"{percent(value, 2)} ± {100 * ci95:.2f}"


EXPERIMENT = Experiment(
    name="quality",
    what="answers checked: what each policy keeps of accuracy and of deadlines",
    paper="",
    row=QualityRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "policies", "rates"}),
    n_seeds=1,
)
