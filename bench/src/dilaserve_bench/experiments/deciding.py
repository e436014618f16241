"""What deciding costs: seconds of one core that the scheduler's core takes for an event, while the
twin drives it at a given size.

Every call of the core counts: results, heartbeats, arrivals, answers, predictions, load control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time

import msgspec
from matplotlib.figure import Figure

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number
from dilaserve_bench.experiments.plots import panels
from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.cluster import ClusterSpec, Group
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import quantile
from dilaserve_bench.twin.scheduler import CoreCalls
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson

__all__ = ["EXPERIMENT", "DecidingRow", "Size", "row_of_run"]

PUBLISHED_MS = (
    (1, 5, 0.4528),
    (4, 20, 0.7584),
    (16, 80, 1.0128),
    (32, 160, 2.027),
    (64, 320, 6.6014),
)
"""(instances, requests, milliseconds of a scheduling call): TeDiServe artifact (Apache-2.0),
plot/scalability_ablation/scalability_128.txt at 4b80d786."""
POLICY = "dilaserve"
QUICK_SHARE = 0.1


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster under a steady load. Seconds are virtual."""

    instances: int
    rate: float
    """Arrivals a second, of the whole cluster."""
    slo_s: float = 9.5
    n_prompt: int = 1075
    overhead: float = 1.594
    heartbeat_s: float = 0.25
    warm_s: float
    """Until as many come as go: what happens before does not count."""
    measured_s: float


SIZES = (
    Size(instances=1, rate=1.2, warm_s=15.0, measured_s=200.0),
    Size(instances=16, rate=1.35 * 16, warm_s=15.0, measured_s=40.0),
    Size(instances=64, rate=1.3 * 64, warm_s=15.0, measured_s=30.0),
    Size(
        instances=1024, rate=800.0, slo_s=38.0, n_prompt=128, overhead=15.0, heartbeat_s=1.0,
        warm_s=38.0, measured_s=20.0,
    ),
)  # fmt: skip
"""Five requests or so of GSM8K on every instance, as published; and the largest, where passes last
a third of a second and heartbeats come once a second, so that most events are the dear ones."""


class DecidingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Of one size. Milliseconds of thread CPU time."""

    policy: str
    instances: int
    requests: int
    """That had arrived and not ended, on average."""
    events_per_s: float
    """Calls of the core per second of virtual time."""
    mean_ms: float
    p99_ms: float
    max_ms: float
    result_ms: float | None
    """Mean of a step result."""
    tick_ms: float | None
    """Mean of load control."""
    n_events: int


def run(session: Session) -> Document[DecidingRow]:
    """One run for each size."""
    share = QUICK_SHARE if session.is_quick else 1.0
    sizes = [_shorter(size, share) for size in (SIZES[:2] if session.is_quick else SIZES)]
    policies = session.options.policies or (POLICY,)
    rows = [
        row
        for policy in policies
        for size in sizes
        if (row := _measured(session, policy, size)) is not None
    ]
    n = max((row.n_events for row in rows), default=0)
    return session.document("deciding", rows, n=n, published=_published())


def row_of_run(policy: str, size: Size, run: Run) -> DecidingRow:
    """What the core took once the load was steady."""
    start, end = size.warm_s, size.warm_s + size.measured_s
    calls = [call for call in _calls(run.core_calls) if start <= call[0] < end]
    took = sorted(seconds for _, seconds, _ in calls)
    return DecidingRow(
        policy=policy,
        instances=size.instances,
        requests=round(_mean_active(run.served, start, end)),
        events_per_s=round(len(calls) / size.measured_s, 1),
        mean_ms=round(1000 * sum(took) / len(took), 4),
        p99_ms=round(1000 * (quantile(took, 0.99) or 0.0), 4),
        max_ms=round(1000 * took[-1], 3),
        result_ms=_mean_ms(calls, "StepResult"),
        tick_ms=_mean_ms(calls, "tick"),
        n_events=len(calls),
    )


Call = tuple[float, float, str]
"""Virtual time, seconds, kind."""


def _measured(session: Session, policy: str, size: Size) -> DecidingRow | None:
    key = {"experiment": "deciding", "policy": policy, "size": msgspec.to_builtins(size)}
    return session.measured(key, DecidingRow, lambda: _measure(session, policy, size))


def _measure(session: Session, policy: str, size: Size) -> DecidingRow | None:
    workload = _workloads(size)(0)
    simulation = Simulation(_scenario(policy, size), workload, 0, timer=thread_time, time_core=True)
    title = f"{policy}, {size.instances} instances"
    with session.watch.follow(simulation, title) as look:
        done = simulation.run(look)
    return None if session.watch.is_stopped else row_of_run(policy, size, done)


def _scenario(policy: str, size: Size) -> Scenario:
    profiles = load_profiles(data_file("h100_llada.json"))
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    options = SimulateOptions(policy=policy, slo_s=size.slo_s)
    spec = ClusterSpec(
        groups=(Group(tp_degree=1, n_instances=size.instances),),
        overhead=size.overhead,
        heartbeat_s=size.heartbeat_s,
    )
    return Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(size.heartbeat_s, None),
        adviser=lambda workload: stand_in(table, workload, options),
        horizon_s=size.warm_s + size.measured_s,
    )


def _workloads(size: Size) -> Workloads:
    each = RequestClass(n_prompt=size.n_prompt, n_output=256, slo_s=size.slo_s)
    n = round(size.rate * (size.warm_s + size.measured_s))
    n_cases = len(load_steps(data_file("gsm8k_llada_steps.json")).rows)
    return poisson([each], rate=size.rate, n=n, n_cases=n_cases)


def _shorter(size: Size, share: float) -> Size:
    return msgspec.structs.replace(size, measured_s=size.measured_s * share)


def _calls(calls: CoreCalls) -> Sequence[Call]:
    return list(zip(calls.at_s, calls.seconds, calls.kinds, strict=True))


def _mean_ms(calls: Sequence[Call], kind: str) -> float | None:
    took = [seconds for _, seconds, each in calls if each == kind]
    return round(1000 * sum(took) / len(took), 4) if took else None


def _mean_active(served: Sequence[Served], start: float, end: float) -> float:
    """Mean over time of the requests that are there between two times."""
    there_s = 0.0
    for each in served:
        ended_at = end if each.outcome == "unfinished" else each.ended_at
        there_s += max(min(ended_at, end) - max(each.arrival.at_s, start), 0.0)
    return there_s / (end - start)


def _published() -> dict[str, object]:
    names = ("instances", "requests", "call_ms")
    return {"rows": [dict(zip(names, row, strict=True)) for row in PUBLISHED_MS]}


def page(document: Document[DecidingRow]) -> Page:
    """By size, beside the published scheduler's call."""
    published = {instances: ms for instances, _, ms in PUBLISHED_MS}
    rows = [
        [
            row.policy, str(row.instances), str(row.requests), number(row.events_per_s, 0),
            number(row.mean_ms), number(row.p99_ms), number(row.max_ms, 1),
            number(row.result_ms), number(row.tick_ms, 2), number(published.get(row.instances)),
        ]
        for row in document.rows
    ]  # fmt: skip
    head = ("policy", "instances", "requests", "events/s", "mean ms", "p99 ms", "max ms",
            "step result ms", "load control ms", "published call ms")  # fmt: skip
    note = "thread CPU time of the scheduler's core alone; events per second of virtual time"
    return Page([Table(head, rows)], [note])


def draw(document: Document[DecidingRow]) -> Figure:
    """Milliseconds by number of instances; dashed: the published call."""
    figure, (axes,) = panels(["cost of deciding"])
    lines: list[tuple[str, Callable[[DecidingRow], float]]] = [
        ("mean", lambda row: row.mean_ms),
        ("p99", lambda row: row.p99_ms),
    ]
    rows = [row for row in document.rows if row.policy == POLICY]
    for name, value in lines:
        axes.plot([row.instances for row in rows], [value(row) for row in rows], "o-", label=name)
    instances, _, took = zip(*PUBLISHED_MS, strict=True)
    axes.plot(instances, took, "--", color="#1f77b4", label="published, a call")
    axes.set(xscale="log", yscale="log", xlabel="instances", ylabel="ms of one core")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="deciding",
    what="what the scheduler's core takes for an event, from 1 to 1,024 instances",
    paper="",
    row=DecidingRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"policies"}),
    n_seeds=1,
)
