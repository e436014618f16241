"""The paper's GSM8K benchmark (section 5.3) in the twin: 16 TP-1 H100, one request class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.experiments.document import Row, row_of
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.runner import Watch, run_seeds
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.workload import RequestClass, Workloads, poisson

__all__ = ["N_REQUESTS", "SLO_S", "Gsm8k"]

N_REQUESTS = 1319
"""The whole of GSM8K's test set."""
N_PROMPT = 1075
"""Mean of the 5-shot prompts, in tokens."""
N_OUTPUT = 256
SLO_S = 9.5


class Gsm8k:
    """Runs points of the benchmark: the same arrivals and step rows for every policy."""

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        watch: Watch,
        timer: Callable[[], float],
        n_requests: int = N_REQUESTS,
        run_ahead: int | None = None,
    ) -> None:
        self.seeds = list(seeds)
        self.n_requests = n_requests
        self.watch = watch
        self._timer = timer
        self._run_ahead = run_ahead
        self._profiles = load_profiles(data_file("h100_llada.json"))
        self._table = load_steps(data_file("gsm8k_llada_steps.json"))

    def row(self, policy: str, rate: float, *, overhead: float, slo_s: float = SLO_S) -> Row | None:
        """One point; None if it was interrupted before a single run was complete."""
        options = SimulateOptions(policy=policy, slo_s=slo_s)
        runs = run_seeds(
            self._scenario(options, overhead),
            self._workloads(rate, slo_s),
            self.seeds,
            watch=self.watch,
            timer=self._timer,
            title=f"{policy} at {rate:g}/s, SLO {slo_s:g} s, overhead {overhead:.3f}",
        )
        return row_of(policy, rate, slo_s, map(report_run, runs))

    def _scenario(self, options: SimulateOptions, overhead: float) -> Scenario:
        spec = ClusterSpec(groups=parse_mix("16xtp1"), overhead=overhead)
        return Scenario(
            cluster=spec,
            profiles=self._profiles,
            policy=lambda: make_policy(options, self._profiles),
            source=lambda workload: recorded_source(self._table, workload),
            core=core_settings(spec.heartbeat_s, self._run_ahead),
            adviser=lambda workload: stand_in(self._table, workload, options),
        )

    def _workloads(self, rate: float, slo_s: float) -> Workloads:
        size = RequestClass(n_prompt=N_PROMPT, n_output=N_OUTPUT, slo_s=slo_s)
        n_gpus = 16
        return poisson([size], rate=rate * n_gpus, n=self.n_requests, n_cases=len(self._table.rows))
