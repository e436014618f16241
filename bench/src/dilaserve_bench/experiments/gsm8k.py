"""The paper's GSM8K benchmark (section 5.3) in the twin: 16 TP-1 H100, one request class.

Every policy gets the same arrivals and the same recorded step rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.profiles import ProfileSet, load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.experiments.document import Row, row_of
from dilaserve_bench.experiments.experiment import Session
from dilaserve_bench.twin.advice import PUBLISHED_WMAPE
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    NOBODY_REFUSED,
    SimulateOptions,
    core_settings,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.prices import Lookup
from dilaserve_bench.twin.recorded import StepTable, load_steps
from dilaserve_bench.twin.report import RunReport, report_run
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson
from dilaserve_gpu_worker.engine.plan_policy import PLAN_TOKENS, PlanPolicyName
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import POLICIES, PolicyOptions

__all__ = ["FIXED", "N_PROMPT", "N_REQUESTS", "QUICK_REQUESTS", "SLO_S", "Gsm8k", "Point", "Wanted"]

N_REQUESTS = 1319
"""The whole of GSM8K's test set."""
QUICK_REQUESTS = 40
N_PROMPT = 1075
"""Mean of the 5-shot prompts, in tokens."""
N_OUTPUT = 256
SLO_S = 9.5
FIXED = "fixed-"
"""A policy of this name is infaas at another threshold: fixed-0.7."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on, but its seed. Rates are per second and GPU."""

    policy: str
    rate: float
    overhead: float
    slo_s: float = SLO_S
    n_prompt: int = N_PROMPT
    n_output: int = N_OUTPUT
    instances: str = "16xtp1"
    lookup: Lookup = "smoothed"
    run_ahead: int | None = None
    predictor_error: float = PUBLISHED_WMAPE
    plan_policy: PlanPolicyName = "blockserve"
    plan_tokens: int = PLAN_TOKENS
    time_gaps: bool = False
    parts: dict[str, Any] = {}
    """Of the policy, as in PolicyOptions, that are not as usual."""


Wanted = tuple[Point, str | None]
"""A point, and the name of its row where that is not the policy's."""


Policies = Mapping[str, Callable[[PolicyOptions], Policy]]
"""By name."""


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    point: Point
    n_requests: int
    seed: int


class Gsm8k:
    """Runs points, or takes them from what was kept."""

    def __init__(
        self, session: Session, policies: Policies = POLICIES, *, n_requests: int = N_REQUESTS
    ) -> None:
        self.n_requests = session.size(n_requests, QUICK_REQUESTS)
        self._session = session
        self._policies = policies

    def rows(self, wanted: Sequence[Wanted]) -> list[Row]:
        """A row for each that was not interrupted before its first seed."""
        self._session.watch.expect(len(wanted) * len(self._session.seeds))
        self._measure_together([point for point, _ in wanted])
        rows = (self.row(point, name) for point, name in wanted)
        return [row for row in rows if row is not None]

    def row(self, point: Point, name: str | None = None) -> Row | None:
        """Means over all seeds that there are, under this name or the policy's; None if it was
        interrupted before the first."""
        return row_of(
            name or point.policy, point.rate, point.slo_s, point.overhead, self.runs(point)
        )

    def runs(self, point: Point) -> list[RunReport]:
        """One for each seed, without its course over time; fewer if it was interrupted."""
        self._measure_together([point])
        measured = self._session.measured
        runs = [measured(key, RunReport, partial(self._watched, key)) for key in self._keys(point)]
        return [run for run in runs if run is not None]

    def _keys(self, point: Point) -> list[_Key]:
        return [
            _Key(point=_as_run(point), n_requests=self.n_requests, seed=seed)
            for seed in self._session.seeds
        ]

    def _measure_together(self, points: Sequence[Point]) -> None:
        keys = [key for point in points for key in self._keys(point)]
        self._session.measure_together(keys, RunReport, partial(_alone, policies=self._policies))

    def _watched(self, key: _Key) -> RunReport | None:
        point, session = key.point, self._session
        title = f"{point.policy} at {point.rate:g}/s, overhead {point.overhead:.3f}"
        simulation = _simulation(key, self._policies, session.timer)
        with session.watch.follow(simulation, f"{title}, seed {key.seed}") as look:
            done = simulation.run(look)
        return _kept(done) if done.is_complete else None


def _alone(key: _Key, policies: Policies) -> RunReport:
    """In a process of its own."""
    return _kept(_simulation(key, policies, time.perf_counter).run())


def _kept(done: Run) -> RunReport:
    return msgspec.structs.replace(report_run(done), percentiles_s=[], slots=[])


def _simulation(key: _Key, policies: Policies, timer: Callable[[], float]) -> Simulation:
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    workload = _workloads(key, len(table.rows))(key.seed)
    return Simulation(_scenario(key.point, policies, table), workload, key.seed, timer=timer)


def _scenario(point: Point, policies: Policies, table: StepTable) -> Scenario:
    profiles = load_profiles(data_file("h100_llada.json"))
    spec = ClusterSpec(
        groups=parse_mix(point.instances),
        overhead=point.overhead,
        lookup=point.lookup,
        lock_step=point.run_ahead == 1,
        plan_policy=point.plan_policy,
        plan_tokens=point.plan_tokens,
    )
    options = SimulateOptions(predictor_error=point.predictor_error)
    return Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: _policy(point, policies, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, point.run_ahead),
        adviser=lambda workload: stand_in(table, workload, options),
        time_gaps=point.time_gaps,
    )


def _policy(point: Point, policies: Policies, profiles: ProfileSet) -> Policy:
    if point.policy not in policies:
        known = ", ".join([*sorted(policies), f"{FIXED}0.7"])
        raise DiLaServeError(f"--policies {point.policy!r} is no policy; use one of {known}")
    usual = PolicyOptions(queue_limit=NOBODY_REFUSED, slo_s=point.slo_s, profiles=profiles)
    return policies[point.policy](replace(usual, **point.parts))


def _workloads(key: _Key, n_cases: int) -> Workloads:
    point = key.point
    size = RequestClass(n_prompt=point.n_prompt, n_output=point.n_output, slo_s=point.slo_s)
    n_gpus = ClusterSpec(groups=parse_mix(point.instances)).n_gpus
    return poisson([size], rate=point.rate * n_gpus, n=key.n_requests, n_cases=n_cases)


def _as_run(point: Point) -> Point:
    """The same point under the name of the policy that really runs."""
    if not point.policy.startswith(FIXED):
        return point
    threshold = _fixed(point.policy)
    parts = {} if threshold == PolicyOptions().threshold else {"threshold": threshold}
    return msgspec.structs.replace(point, policy="infaas", parts={**point.parts, **parts})


def _fixed(name: str) -> float:
    try:
        threshold = float(name.removeprefix(FIXED))
    except ValueError:
        threshold = math.nan
    if not 0.0 <= threshold <= 1.0:
        raise DiLaServeError(
            f"--policies {name!r} names no threshold in 0..1; write for example {FIXED}0.7"
        )
    return threshold
