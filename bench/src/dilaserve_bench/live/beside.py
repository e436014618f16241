"""The twin of a live stack: fitted to some traces, and run on all of them.

The twin goes through the whole trial in one run, as the stack did, so that its policy has learned
what the live one had. What it says of a test trace depends on nothing that was seen in that trace
but its arrivals.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dilaserve.settings import load, variable
from dilaserve_bench.experiments.spans import mean_threshold
from dilaserve_bench.live.fit import PassFit, fit_passes
from dilaserve_bench.live.passes import turns
from dilaserve_bench.live.stack import MAX_BATCH_TOKENS
from dilaserve_bench.live.trial import Trace
from dilaserve_bench.tiny.evaluate import Case
from dilaserve_bench.tiny.tasks import TASKS
from dilaserve_bench.twin.advice import trained_in
from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.cluster import ClusterSpec, Group
from dilaserve_bench.twin.options import core_settings
from dilaserve_bench.twin.report import quantile
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.tiny import TinyProblems
from dilaserve_bench.twin.workload import Workload
from dilaserve_scheduler.policies import build_policy
from dilaserve_scheduler.settings import SchedulerSettings

__all__ = ["Outcome", "Twin", "live_outcome", "run_twin", "scenario_of"]

SLOT_S = 0.25


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one trace, live or in the twin."""

    attainment: float
    p50_s: float
    p99_s: float
    mean_threshold: float | None
    accuracy: float | None


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted, and what the twin then said of each trace."""

    passes: PassFit
    client_s: float
    """What a client waits beside the passes and the messages that the twin has."""
    outcomes: list[Outcome]


def run_twin(
    traces: Sequence[Trace],
    problems: TinyProblems,
    environ: Mapping[str, str],
    *,
    timer: Callable[[], float],
) -> Twin:
    """Fitted to the traces of that role; what clients wait beside, to the lightest of them.
    `environ`: as the stack's services had it."""
    fitted = [trace for trace in traces if trace.role == "fit"]
    passes = fit_passes([turn for trace in fitted for turn in turns(trace.passes)])
    workload = [arrival for number, trace in enumerate(traces) for arrival in _of(number, trace)]
    run = Simulation(scenario_of(passes, problems, environ), workload, 0, timer=timer).run()
    served = _by_trace(run)
    client_s = _client_s(traces, served)
    outcomes = [
        _virtual_outcome(run, served[number], trace, client_s)
        for number, trace in enumerate(traces)
    ]
    return Twin(passes=passes, client_s=client_s, outcomes=outcomes)


def live_outcome(trace: Trace, problems: TinyProblems) -> Outcome:
    """As the clients saw it."""
    slo_s = {arrival.request_id: arrival.slo_s or 0.0 for arrival in trace.workload}
    cases = {arrival.request_id: problems.cases[arrival.case] for arrival in trace.workload}
    done = [answer for answer in trace.answers if answer.outcome == "done"]
    n_in_time = sum(answer.latency_s <= slo_s[answer.request_id] for answer in done)
    n_right = sum(_is_right(cases[answer.request_id], answer.text) for answer in done)
    latencies = sorted(answer.latency_s for answer in done)
    n_steps = sum(seen.n_steps for seen in trace.passes)
    return Outcome(
        attainment=n_in_time / len(trace.answers),
        p50_s=quantile(latencies, 0.5) or 0.0,
        p99_s=quantile(latencies, 0.99) or 0.0,
        mean_threshold=sum(seen.threshold_sum for seen in trace.passes) / max(n_steps, 1),
        accuracy=n_right / max(len(done), 1),
    )


def scenario_of(passes: PassFit, problems: TinyProblems, environ: Mapping[str, str]) -> Scenario:
    """One worker, the policy of the stack, and the real model in the loop."""
    settings = load(SchedulerSettings, environ)
    trained = trained_in(Path(environ[variable("model")]))
    spec = ClusterSpec(
        groups=(Group(tp_degree=1, n_instances=1),), max_batch_tokens=MAX_BATCH_TOKENS
    )
    return Scenario(
        cluster=spec,
        profiles=None,
        pass_seconds=lambda _: passes.seconds,
        policy=lambda: build_policy(settings.policy, settings.options()),
        source=problems.source("dual"),
        judge=problems.judge(),
        core=core_settings(spec.heartbeat_s, settings.core().run_ahead),
        adviser=None if trained is None else lambda _: trained,
        slot_s=SLOT_S,
    )


def _client_s(traces: Sequence[Trace], served: Mapping[int, Sequence[Served]]) -> float:
    """By how much the live median exceeds the twin's at the lightest load that was fitted to."""
    lightest = min(trace.rate for trace in traces if trace.role == "fit")
    light = [n for n, t in enumerate(traces) if (t.role, t.rate) == ("fit", lightest)]
    live = statistics.median(answer.latency_s for n in light for answer in traces[n].answers)
    twin = statistics.median(each.latency_s for n in light for each in served[n])
    return max(live - twin, 0.0)


def _of(number: int, trace: Trace) -> Workload:
    """Its arrivals on the clock of the trial."""
    return [
        msgspec.structs.replace(
            arrival,
            request_id=f"{number}/{arrival.request_id}",
            at_s=trace.start_s + arrival.at_s,
        )
        for arrival in trace.workload
    ]


def _by_trace(run: Run) -> dict[int, list[Served]]:
    groups: dict[int, list[Served]] = {}
    for served in run.served:
        groups.setdefault(int(served.arrival.request_id.partition("/")[0]), []).append(served)
    return groups


def _virtual_outcome(run: Run, served: Sequence[Served], trace: Trace, client_s: float) -> Outcome:
    done = [each for each in served if each.outcome == "done"]
    latencies = sorted(each.latency_s + client_s for each in done)
    n_in_time = sum(e.latency_s + client_s <= (e.arrival.slo_s or 0.0) for e in done)
    end_s = max(each.ended_at for each in served)
    return Outcome(
        attainment=n_in_time / len(served),
        p50_s=quantile(latencies, 0.5) or 0.0,
        p99_s=quantile(latencies, 0.99) or 0.0,
        mean_threshold=mean_threshold(run, trace.start_s, end_s),
        accuracy=sum(bool(each.right) for each in done) / max(len(done), 1),
    )


def _is_right(case: Case, text: str) -> bool:
    return TASKS[case.problem.task].check(case.problem, text)
