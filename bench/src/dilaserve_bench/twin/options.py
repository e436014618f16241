"""What `dilaserve simulate` can be told, and the scenario and workloads that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.profiles import ProfileSet, load_profiles
from dilaserve_bench.data import average_day, data_file, sharegpt_classes
from dilaserve_bench.twin.advice import PUBLISHED_WMAPE, StandIn, trained_in
from dilaserve_bench.twin.checks import check_options
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.faults import parse_fault
from dilaserve_bench.twin.prices import Lookup
from dilaserve_bench.twin.recorded import RecordedSource, StepTable, load_steps
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.traces import is_rates, read_rates, read_trace
from dilaserve_bench.twin.workload import (
    RequestClass,
    Workload,
    Workloads,
    daily,
    lasting,
    poisson,
    replayed,
)
from dilaserve_gpu_worker.engine.plan_policy import PLAN_TOKENS, PlanPolicyName
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import PolicyOptions, build_policy

__all__ = [
    "Plan",
    "SimulateOptions",
    "core_settings",
    "make_plan",
    "make_policy",
    "recorded_source",
    "stand_in",
]

NOBODY_REFUSED = 10**9
"""Queue limit: overload is to show as missed SLOs, not as refusals."""
PROBLEM_SEED = 2026
LONGEST_S = 366 * 86_400.0
"""Of the arrivals, if they are all to be served."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As on the command line, which explains them."""

    policy: str = "dilaserve"
    threshold: float = 0.9
    instances: str = "16xtp1"
    budget: int = 8192
    cache: CacheMode = "dual"
    plan_policy: PlanPolicyName = "blockserve"
    plan_tokens: int = PLAN_TOKENS
    profile: str = ""
    overhead: float = 1.0
    lookup: Lookup = "smoothed"
    rate: float = 1.5
    trace: str = ""
    average_day: bool = False
    speed: float = 1.0
    requests: int | None = None
    sizes: Literal["fixed", "sharegpt"] = "fixed"
    prompt: int | None = None
    output: int = 256
    slo_s: float = 9.5
    source: Literal["recorded", "model"] = "recorded"
    steps: str = ""
    model: str = ""
    problems: int = 64
    threads: int = 1
    run_ahead: int | None = None
    faults: tuple[str, ...] = ()
    horizon_s: float | None = None
    predictor_error: float = PUBLISHED_WMAPE
    """WMAPE of the predictor's stand-in for recorded steps; below 0 there is no predictor. With a
    model in the loop it is the trained one in the model's folder, if there is one."""
    replan: bool = False
    replan_every_s: float = 300.0
    nodes: str = ""
    min_gain: float = 0.1
    start_up: str = "16/2+20"


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    scenario: Scenario
    workloads: Workloads


def make_plan(options: SimulateOptions, environ: Mapping[str, str]) -> Plan:
    """Raises DiLaServeError for what cannot be simulated."""
    check_options(options)
    spec = ClusterSpec(
        groups=parse_mix(options.instances),
        overhead=options.overhead,
        max_batch_tokens=options.budget,
        n_kv_tokens=2 * options.budget,
        cache_mode=options.cache,
        plan_policy=options.plan_policy,
        plan_tokens=options.plan_tokens,
        lookup=options.lookup,
        lock_step=options.run_ahead == 1,
    )
    steps = Path(options.steps) if options.steps else data_file("gsm8k_llada_steps.json")
    table = load_steps(steps)
    profile = Path(options.profile) if options.profile else data_file("h100_llada.json")
    profiles = load_profiles(profile)
    scenario = Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, options.run_ahead),
        faults=[parse_fault(text, spec.n_instances) for text in options.faults],
        horizon_s=options.horizon_s if options.horizon_s is not None else float("inf"),
    )
    make_policy(options, profiles)  # so that an unknown one is found now
    if options.replan:
        from dilaserve_bench.twin.replan_options import make_replan

        scenario = replace(scenario, replan=make_replan(options, spec, profiles, steps))
    if options.source == "model":
        return _with_model(options, environ, scenario)
    if options.predictor_error >= 0:
        scenario = replace(scenario, adviser=lambda workload: stand_in(table, workload, options))
    return Plan(scenario, _workloads(options, spec, len(table.rows)))


def recorded_source(table: StepTable, workload: Workload) -> RecordedSource:
    """Every request behaves as the recorded one that its case names."""
    rows = {arrival.request_id: arrival.case for arrival in workload}
    return RecordedSource(table, rows.__getitem__)


def core_settings(heartbeat_s: float, run_ahead: int | None) -> CoreSettings:
    """The core's patience in proportion to the heartbeats: dead after 8, as in production."""
    return CoreSettings(
        dead_after_s=8 * heartbeat_s,
        gap_s=2 * heartbeat_s,
        resend_after_s=4 * heartbeat_s,
        run_ahead=run_ahead,
    )


def make_policy(options: SimulateOptions, profiles: ProfileSet) -> Policy:
    """A fresh policy. Raises SettingsError for an unknown one."""
    return build_policy(
        options.policy,
        PolicyOptions(
            threshold=options.threshold,
            queue_limit=NOBODY_REFUSED,
            slo_s=options.slo_s,
            profiles=profiles,
        ),
    )


def stand_in(table: StepTable, workload: Workload, options: SimulateOptions) -> StandIn:
    """The predictor of a run with recorded steps."""
    rows = {arrival.request_id: arrival.case for arrival in workload}
    return StandIn(table, rows.__getitem__, wmape=options.predictor_error)


def _with_model(options: SimulateOptions, environ: Mapping[str, str], scenario: Scenario) -> Plan:
    from dilaserve_bench.twin.tiny import load_problems

    folder = find_model(Path(options.model) if options.model else None, environ)
    problems = load_problems(
        folder, n_per_task=options.problems, seed=PROBLEM_SEED, threads=options.threads
    )
    arrivals = _workloads(options, scenario.cluster, len(problems.cases))
    trained = trained_in(folder) if options.predictor_error >= 0 else None
    return Plan(
        replace(
            scenario,
            adviser=(lambda _: trained) if trained is not None else None,
            source=problems.source(options.cache),
            judge=problems.judge(),
            ignore_eos=False,
        ),
        problems.sized(arrivals, n_prompt=options.prompt),
    )


def _workloads(options: SimulateOptions, spec: ClusterSpec, n_cases: int) -> Workloads:
    drawn = _drawn(options, spec, n_cases)
    return drawn if options.horizon_s is not None else lasting(drawn, LONGEST_S)


def _drawn(options: SimulateOptions, spec: ClusterSpec, n_cases: int) -> Workloads:
    classes = _classes(options)
    if options.average_day and options.trace:
        raise DiLaServeError("--average-day and --trace exclude each other; give one of them")
    if options.average_day:
        day = average_day()
        rates, slot_s = day.rates, day.slot_s
    elif options.trace and is_rates(Path(options.trace)):
        series = read_rates(Path(options.trace))
        rates, slot_s = list(series.rates), series.slot_s
    elif options.trace:
        return _replayed(options, spec, classes[0], n_cases)
    else:
        rate, n = options.rate * spec.n_gpus, options.requests or 1319
        return poisson(classes, rate=rate, n=n, n_cases=n_cases)
    scaled = [options.speed * rate for rate in rates]
    return daily(classes, rates=scaled, slot_s=slot_s, n_cases=n_cases, n=options.requests)


def _replayed(
    options: SimulateOptions, spec: ClusterSpec, like: RequestClass, n_cases: int
) -> Workloads:
    entries = read_trace(
        Path(options.trace),
        block_length=spec.block_length,
        max_sequence_length=spec.max_sequence_length,
        limit=options.requests,
    )
    return replayed(entries, like, n_cases=n_cases, speed=options.speed)


def _classes(options: SimulateOptions) -> list[RequestClass]:
    sizes = [(options.prompt or 1075, options.output, 1.0)]
    if options.sizes == "sharegpt":
        sizes = sharegpt_classes().classes
    return [
        RequestClass(n_prompt=n_prompt, n_output=n_output, weight=weight, slo_s=options.slo_s)
        for n_prompt, n_output, weight in sizes
    ]
