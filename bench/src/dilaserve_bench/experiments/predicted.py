"""Runs of the twin that differ in who predicts the steps, with the bundled model in the loop.

A mixture of short and long requests under an SLO that the long ones meet only if they are known as
such in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.experiments.document import row_of
from dilaserve_bench.experiments.experiment import Session
from dilaserve_bench.twin.advice import OneShot, Trained
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import NOBODY_REFUSED, core_settings
from dilaserve_bench.twin.report import RunReport, report_run
from dilaserve_bench.twin.runner import run_seeds
from dilaserve_bench.twin.scheduler import Adviser
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson
from dilaserve_predictor.model import Predictor
from dilaserve_scheduler.policies import POLICIES, PolicyOptions

if TYPE_CHECKING:
    from dilaserve_bench.twin.tiny import TinyProblems

__all__ = ["ServedRow", "Variants", "serve"]

POLICY = "dilaserve"
SLO_S = 0.4
"""A request of 20 steps takes that long on an idle instance, one of 3 steps a quarter of it."""
INSTANCES = "4xtp1"
OVERHEAD = 1.5
N_PROMPT = 1075
"""What prompts are priced as, as in the paper's benchmark."""
PROBLEM_SEED = 2026
PROBLEMS_PER_TASK = 64


class ServedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds."""

    variant: str
    rate: float
    """Arrivals a second and GPU."""
    attainment: float
    ci95: float | None
    mean_threshold: float | None
    accuracy: float | None
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Variants:
    """Who is asked."""

    full: Predictor
    progress: Predictor
    steps_per_token: Mapping[float, float]
    """By threshold, of the estimate at arrival."""
    upper: float
    """Upper quantile over that estimate."""

    def adviser(self, variant: str) -> Adviser:
        """A fresh one of this name."""
        if variant == "one_shot":
            return OneShot(self.steps_per_token, upper=self.upper)
        return Trained(self.full if variant == "full" else self.progress)


def serve(
    session: Session,
    folder: Path,
    train: Callable[[], Variants],
    rates: Sequence[float],
    n_requests: int,
) -> list[ServedRow]:
    """A row for each variant and rate; the arrivals and problems of a seed are the same."""
    runs = _Runs(session, folder, train, n_requests)
    wanted = [(variant, rate) for rate in rates for variant in ("one_shot", "progress", "full")]
    rows = [runs.row(variant, rate) for variant, rate in wanted]
    return [row for row in rows if row is not None]


class _Runs:
    def __init__(
        self, session: Session, folder: Path, train: Callable[[], Variants], n_requests: int
    ) -> None:
        self._session = session
        self._folder = folder
        self._train = train
        self._n_requests = n_requests
        self._profiles = load_profiles(data_file("h100_llada.json"))
        self._spec = ClusterSpec(groups=parse_mix(INSTANCES), overhead=OVERHEAD)
        self._problems: TinyProblems | None = None

    def row(self, variant: str, rate: float) -> ServedRow | None:
        runs = [r for seed in self._session.seeds if (r := self._run(variant, rate, seed))]
        row = row_of(variant, rate, SLO_S, OVERHEAD, runs)
        if row is None:
            return None
        return ServedRow(
            variant=variant,
            rate=rate,
            attainment=row.attainment,
            ci95=row.ci95,
            mean_threshold=row.mean_threshold,
            accuracy=row.accuracy,
            p50_s=row.p50_s,
            p99_s=row.p99_s,
        )

    def _run(self, variant: str, rate: float, seed: int) -> RunReport | None:
        key = {
            "measure": "served",
            "variant": variant,
            "rate": rate,
            "seed": seed,
            "n_requests": self._n_requests,
        }
        return self._session.measured(key, RunReport, lambda: self._measure(variant, rate, seed))

    def _measure(self, variant: str, rate: float, seed: int) -> RunReport | None:
        runs = run_seeds(
            self._scenario(variant),
            self._workloads(rate),
            [seed],
            watch=self._session.watch,
            timer=self._session.timer,
            title=f"{variant} at {rate:g}/s",
        )
        report = report_run(next(runs))
        if not report.is_complete:
            return None
        return msgspec.structs.replace(report, percentiles_s=[], slots=[])

    def _scenario(self, variant: str) -> Scenario:
        problems, variants = self._load(), self._train()
        options = PolicyOptions(queue_limit=NOBODY_REFUSED, slo_s=SLO_S, profiles=self._profiles)
        return Scenario(
            cluster=self._spec,
            profiles=self._profiles,
            policy=lambda: POLICIES[POLICY](options),
            source=problems.source(self._spec.cache_mode),
            judge=problems.judge(),
            ignore_eos=False,
            core=core_settings(self._spec.heartbeat_s, None),
            adviser=lambda _: variants.adviser(variant),
        )

    def _workloads(self, rate: float) -> Workloads:
        problems = self._load()
        size = RequestClass(n_prompt=N_PROMPT, n_output=96, slo_s=SLO_S)
        arrivals = poisson(
            [size],
            rate=rate * self._spec.n_gpus,
            n=self._n_requests,
            n_cases=len(problems.cases),
        )
        return problems.sized(arrivals, n_prompt=N_PROMPT)

    def _load(self) -> TinyProblems:
        from dilaserve_bench.twin.tiny import load_problems

        if self._problems is None:
            self._problems = load_problems(
                self._folder, n_per_task=PROBLEMS_PER_TASK, seed=PROBLEM_SEED
            )
        return self._problems
