"""The paper's GSM8K benchmark (section 5.3) in the twin: 16 TP-1 H100, one request class.

Every policy gets the same arrivals and the same recorded step rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.profiles import load_profiles
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
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import RunReport, report_run
from dilaserve_bench.twin.runner import run_seeds
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson
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
    run_ahead: int | None = None
    predictor_error: float = PUBLISHED_WMAPE
    parts: dict[str, Any] = {}
    """Of the policy, as in PolicyOptions, that are not as usual."""


Wanted = tuple[Point, str | None]
"""A point, and the name of its row where that is not the policy's."""


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    point: Point
    n_requests: int
    seed: int


class Gsm8k:
    """Runs points, or takes them from what was kept."""

    def __init__(
        self, session: Session, policies: Mapping[str, Callable[[PolicyOptions], Policy]] = POLICIES
    ) -> None:
        self.n_requests = session.size(N_REQUESTS, QUICK_REQUESTS)
        self._session = session
        self._policies = policies
        self._profiles = load_profiles(data_file("h100_llada.json"))
        self._table = load_steps(data_file("gsm8k_llada_steps.json"))

    def rows(self, wanted: Sequence[Wanted]) -> list[Row]:
        """A row for each that was not interrupted before its first seed."""
        self._session.watch.expect(len(wanted) * len(self._session.seeds))
        rows = (self.row(point, name) for point, name in wanted)
        return [row for row in rows if row is not None]

    def row(self, point: Point, name: str | None = None) -> Row | None:
        """Means over all seeds that there are, under this name or the policy's; None if it was
        interrupted before the first."""
        runs = [run for seed in self._session.seeds if (run := self.run(point, seed)) is not None]
        return row_of(name or point.policy, point.rate, point.slo_s, point.overhead, runs)

    def run(self, point: Point, seed: int) -> RunReport | None:
        """One run, without its course over time; None if it was interrupted."""
        key = _Key(point=_as_run(point), n_requests=self.n_requests, seed=seed)
        return self._session.measured(key, RunReport, lambda: self._measure(key))

    def _measure(self, key: _Key) -> RunReport | None:
        point = key.point
        runs = run_seeds(
            self._scenario(point),
            self._workloads(point),
            [key.seed],
            watch=self._session.watch,
            timer=self._session.timer,
            title=f"{point.policy} at {point.rate:g}/s, overhead {point.overhead:.3f}",
        )
        report = report_run(next(runs))
        if not report.is_complete:
            return None
        return msgspec.structs.replace(report, percentiles_s=[], slots=[])

    def _scenario(self, point: Point) -> Scenario:
        spec = ClusterSpec(groups=parse_mix(point.instances), overhead=point.overhead)
        options = SimulateOptions(predictor_error=point.predictor_error)
        return Scenario(
            cluster=spec,
            profiles=self._profiles,
            policy=lambda: self._policy(point),
            source=lambda workload: recorded_source(self._table, workload),
            core=core_settings(spec.heartbeat_s, point.run_ahead),
            adviser=lambda workload: stand_in(self._table, workload, options),
        )

    def _policy(self, point: Point) -> Policy:
        usual = PolicyOptions(
            queue_limit=NOBODY_REFUSED, slo_s=point.slo_s, profiles=self._profiles
        )
        if point.policy not in self._policies:
            known = ", ".join([*sorted(self._policies), f"{FIXED}0.7"])
            raise DiLaServeError(f"--policies {point.policy!r} is no policy; use one of {known}")
        return self._policies[point.policy](replace(usual, **point.parts))

    def _workloads(self, point: Point) -> Workloads:
        size = RequestClass(n_prompt=point.n_prompt, n_output=point.n_output, slo_s=point.slo_s)
        n_gpus = ClusterSpec(groups=parse_mix(point.instances)).n_gpus
        return poisson(
            [size], rate=point.rate * n_gpus, n=self.n_requests, n_cases=len(self._table.rows)
        )


def _as_run(point: Point) -> Point:
    """The same point under the name of the policy that really runs."""
    if not point.policy.startswith(FIXED):
        return point
    threshold = _fixed(point.policy)
    parts = {} if threshold == PolicyOptions().threshold else {"threshold": threshold}
    return msgspec.structs.replace(point, policy="infaas", parts={**point.parts, **parts})


def _fixed(name: str) -> float:
    try:
        return float(name.removeprefix(FIXED))
    except ValueError:
        raise DiLaServeError(
            f"--policies {name!r} names no threshold; write for example {FIXED}0.7"
        ) from None
