"""Small scenarios, and data that several tests of the twin share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import core_settings, recorded_source
from dilaserve_bench.twin.recorded import StepTable
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import Arrival, Workload
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies import PolicyOptions, build_policy

TABLE = StepTable(
    model="test",
    what="made up",
    source="this file",
    licence="Apache-2.0",
    n_output=64,
    block_length=16,
    thresholds=[0.5, 0.7, 0.9],
    rows=[[8, 13, 23], [4, 5, 4], [11, 9, 64], [7, 30, 41]],
)
"""Not monotone on purpose; from the least, a step a block, to the most, a step a token."""

PROFILES = ProfileSet(
    model="test",
    device="none",
    profiles=[
        LatencyProfile(tp_degree=1, points=[Point(16, 0.01), Point(4096, 0.5)]),
        LatencyProfile(tp_degree=2, points=[Point(16, 0.01), Point(4096, 0.3)]),
    ],
)


def infaas(threshold: float = 0.9) -> Callable[[], Policy]:
    """Fresh policies with a fixed threshold."""
    options = PolicyOptions(threshold=threshold, queue_limit=10**9)
    return lambda: build_policy("infaas", options)


def spec(mix: str = "2xtp1", **changes: object) -> ClusterSpec:
    """Small instances: 512 tokens of full length each, blocks of 16."""
    values: dict[str, object] = {
        "max_batch_tokens": 512,
        "n_kv_tokens": 1024,
        "block_length": 16,
        **changes,
    }
    return ClusterSpec(groups=parse_mix(mix), **values)  # type: ignore[arg-type]


def scenario(cluster: ClusterSpec | None = None, **changes: object) -> Scenario:
    """Recorded steps under `infaas`."""
    cluster = cluster or spec()
    values: dict[str, object] = {
        "policy": infaas(),
        "profiles": PROFILES,
        "source": lambda workload: recorded_source(TABLE, workload),
        "core": core_settings(cluster.heartbeat_s, None),
        **changes,
    }
    return Scenario(cluster=cluster, **values)  # type: ignore[arg-type]


def arrivals(
    times: Sequence[float], *, n_prompt: int = 64, n_output: int = 64, slo_s: float | None = 10.0
) -> Workload:
    """Requests of one size at given times; their cases take turns."""
    return [
        Arrival(
            request_id=f"r{number}",
            at_s=at_s,
            n_prompt=n_prompt,
            n_output=n_output,
            case=number % len(TABLE.rows),
            slo_s=slo_s,
        )
        for number, at_s in enumerate(times)
    ]


def run(scenario: Scenario, workload: Workload) -> Run:
    """Run it to its end; the time that it takes does not count."""
    return Simulation(scenario, workload, 0, timer=lambda: 0.0).run()
