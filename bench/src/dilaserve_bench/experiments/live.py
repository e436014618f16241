"""How far the twin can be believed: a live stack on two cores, and the twin beside it.

The real gateway, scheduler, predictor, NATS, Valkey and one real worker with the tiny model serve
Poisson arrivals at one rate on each side of the knee. The twin is fitted on other traces (passes
and what clients wait beside), and denoises the same problems with the same model.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from dilaserve.model_folder import find_model
from dilaserve.settings import variable
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number

if TYPE_CHECKING:
    from dilaserve_bench.live.beside import Outcome
    from dilaserve_bench.live.trial import Plan, Trace

__all__ = ["EXPERIMENT", "LiveRow"]

POLICIES = ("infaas", "dilaserve")
N_PER_TASK = 250
PROBLEM_SEED = 2026
QUICK_REQUESTS = 60


class LiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trace: what the clients of the live stack saw, and what the twin said."""

    policy: str
    rate: float
    """Arrivals a second; there is one worker."""
    load: float
    """The rate as a multiple of what the stack takes."""
    n: int
    attainment: float
    twin_attainment: float
    p50_s: float
    twin_p50_s: float
    p99_s: float
    twin_p99_s: float
    n_failed: int
    accuracy: float | None
    twin_accuracy: float | None
    mean_threshold: float | None
    twin_mean_threshold: float | None
    late_ms: float
    """By how much the load generator was late, at the most."""
    busy: float
    """Share of the time for which the core of all but the worker was busy."""


class TraceNote(msgspec.Struct, frozen=True, kw_only=True):
    """One trace of a trial, in the order in which they were driven."""

    role: str
    rate: float
    throughput: float
    busy: float
    p50_s: float
    twin_p50_s: float


class PolicyTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one policy."""

    rows: list[LiveRow]
    capacity: float
    passes: dict[str, float]
    client_s: float
    traces: list[TraceNote]


def run(session: Session) -> Document[LiveRow]:
    """One stack after the other."""
    trials: dict[str, PolicyTrial] = {}
    for policy in session.options.policies or POLICIES:
        key = {"experiment": "live", "policy": policy, "quick": session.is_quick}
        trial = session.measured(key, PolicyTrial, lambda policy=policy: _measure(session, policy))  # type: ignore[misc]
        if trial is not None:
            trials[policy] = trial
    rows = [row for trial in trials.values() for row in trial.rows]
    return session.document(
        "live",
        rows,
        n=max((row.n for row in rows), default=0),
        found={
            policy: {
                "capacity": trial.capacity,
                "passes": trial.passes,
                "client_s": trial.client_s,
                "traces": msgspec.to_builtins(trial.traces),
            }
            for policy, trial in trials.items()
        },
    )


def _measure(session: Session, policy: str) -> PolicyTrial | None:
    from dilaserve_bench.live.beside import live_outcome, run_twin
    from dilaserve_bench.live.cores import apart
    from dilaserve_bench.live.stack import one_worker_stack, settings_of
    from dilaserve_bench.live.trial import InterruptedTrialError, run_trial
    from dilaserve_bench.twin.tiny import load_problems

    folder = find_model(None, session.environ)
    problems = load_problems(folder, n_per_task=N_PER_TASK, seed=PROBLEM_SEED)
    environ = settings_of({**session.environ, variable("model"): str(folder)}, policy)
    watch = session.watch

    async def live() -> list[Trace]:
        with apart() as core:
            async with one_worker_stack(folder, environ, worker_core=core) as stack:
                return await run_trial(
                    stack,
                    problems,
                    folder.name,
                    _plan(session),
                    say=lambda text: watch.say(f"{policy}: {text}"),
                    interrupted=lambda: watch.is_stopped,
                )

    try:
        traces = asyncio.run(live())
    except InterruptedTrialError:
        return None
    watch.say(f"{policy}: the twin beside it")
    twin = run_twin(traces, problems, environ, timer=session.timer)
    (burst,) = (trace for trace in traces if trace.role == "burst")
    lived = [live_outcome(trace, problems) for trace in traces]
    together = list(zip(traces, lived, twin.outcomes, strict=True))
    return PolicyTrial(
        rows=[_row(policy, burst.throughput, *each) for each in together if each[0].role == "test"],
        traces=[_note(*each) for each in together],
        capacity=round(burst.throughput, 3),
        passes=msgspec.to_builtins(twin.passes),
        client_s=round(twin.client_s, 5),
    )


def _plan(session: Session) -> Plan:
    from dilaserve_bench.live.trial import Plan as TrialPlan

    n = QUICK_REQUESTS
    return TrialPlan(n_burst=n, n_fit=n, n_test=n) if session.is_quick else TrialPlan()


def _note(trace: Trace, live: Outcome, virtual: Outcome) -> TraceNote:
    return TraceNote(
        role=trace.role,
        rate=round(trace.rate, 2),
        throughput=round(trace.throughput, 2),
        busy=round(trace.busy, 3),
        p50_s=round(live.p50_s, 4),
        twin_p50_s=round(virtual.p50_s, 4),
    )


def _row(policy: str, capacity: float, trace: Trace, live: Outcome, virtual: Outcome) -> LiveRow:
    return LiveRow(
        policy=policy,
        rate=round(trace.rate, 3),
        load=round(trace.rate / capacity, 3),
        n=len(trace.answers),
        attainment=live.attainment,
        twin_attainment=virtual.attainment,
        p50_s=round(live.p50_s, 4),
        twin_p50_s=round(virtual.p50_s, 4),
        p99_s=round(live.p99_s, 4),
        twin_p99_s=round(virtual.p99_s, 4),
        n_failed=sum(answer.outcome != "done" for answer in trace.answers),
        accuracy=live.accuracy,
        twin_accuracy=virtual.accuracy,
        mean_threshold=live.mean_threshold,
        twin_mean_threshold=virtual.mean_threshold,
        busy=round(trace.busy, 3),
        late_ms=round(1000 * trace.late_s, 1),
    )


def page(document: Document[LiveRow]) -> Page:
    """Live, twin, and how far they are apart."""
    head = ("policy", "rate", "of capacity", "n", "attainment", "twin", "points", "p50 s", "twin",
            "off by", "p99 s", "twin", "threshold", "twin", "accuracy", "twin")  # fmt: skip
    rows = [
        [
            row.policy, number(row.rate, 1), number(row.load, 2), str(row.n),
            number(row.attainment), number(row.twin_attainment),
            f"{100 * (row.twin_attainment - row.attainment):+.1f}",
            number(row.p50_s), number(row.twin_p50_s),
            f"{100 * (row.twin_p50_s / row.p50_s - 1):+.1f} %",
            number(row.p99_s), number(row.twin_p99_s),
            number(row.mean_threshold), number(row.twin_mean_threshold),
            number(row.accuracy), number(row.twin_accuracy),
        ]
        for row in document.rows
    ]  # fmt: skip
    notes = [
        f"{policy}: {found['capacity']:.1f} requests a second in a burst; fitted: a pass takes "
        f"{_milliseconds(found['passes'])}; clients wait {1000 * found['client_s']:.1f} ms beside"
        for policy, found in document.found.items()
    ]
    late = max((row.late_ms for row in document.rows), default=0.0)
    busy = max((row.busy for row in document.rows), default=0.0)
    n_disturbed = sum(
        note["role"] == "disturbed" for found in document.found.values() for note in found["traces"]
    )
    beside = (
        f"the load generator was late by {late} ms at most; the core of all but the worker was "
        f"busy for {busy:.0%} of the time at most; {n_disturbed} traces were driven again, since "
        "the generator was late"
    )
    return Page([Table(head, rows)], [*notes, beside])


def _milliseconds(passes: dict[str, float]) -> str:
    names = {"base_s": "", "token_s": " a token", "row_s": " a row", "new_row_s": " a new row"}
    return " + ".join(f"{1000 * passes[key]:.3f} ms{of}" for key, of in names.items())


EXPERIMENT = Experiment(
    name="live",
    what="a live stack on two cores, and the twin fitted on other traces beside it",
    paper="",
    row=LiveRow,
    run=run,
    page=page,
    takes=frozenset({"policies"}),
    n_seeds=1,
)
