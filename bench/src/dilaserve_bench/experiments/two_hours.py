"""The paper's 2-hour trace (Figures 8 and 9, Table 5) for the twin: the average day with ShareGPT's
sizes on 16 × TP-1.

Arrivals are scaled so that INFaaS has its published attainment under load. Only sizes and rates are
the trace's; steps are those recorded on GSM8K, in proportion to the output.
"""

from __future__ import annotations

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file
from dilaserve_bench.data import sharegpt_classes as sharegpt
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.workload import RequestClass, Workloads, daily

__all__ = [
    "LOADED_FROM",
    "LOOKS_PER_SLOT",
    "N_GPUS",
    "OVERHEAD",
    "PEAK",
    "QUICK_SLOT_S",
    "SLO_S",
    "parts_of_day",
    "two_hours",
    "two_hours_served",
]

SLO_S = 12.5
N_GPUS = 16
OVERHEAD = 1.594
"""The step overhead that `calibration` fits."""
PEAK = 1.75
"""Arrivals a second and GPU in the busiest slot: INFaaS then attains 69 % of the loaded part
(published: 68 %, on other GPUs, with a peak of 1.264)."""
LOADED_FROM = 9
"""The slots from here on are the loaded part of the day: minutes 45 to 120 (Table 5)."""
LOOKS_PER_SLOT = 5
"""How finely a run is looked at through time: by the minute, where a slot has five of them."""
QUICK_SLOT_S = 5.0
"""Instead of 300 s: the whole day in two minutes."""


def two_hours(peak: float, slot_s: float) -> Workloads:
    """`peak`: arrivals a second and GPU in the busiest slot."""
    rates = average_day().rates
    scale = N_GPUS * peak / max(rates)
    classes = [
        RequestClass(n_prompt=n_prompt, n_output=n_output, weight=weight, slo_s=SLO_S)
        for n_prompt, n_output, weight in sharegpt().classes
    ]
    n_cases = len(load_steps(data_file("gsm8k_llada_steps.json")).rows)
    return daily(classes, rates=[scale * rate for rate in rates], slot_s=slot_s, n_cases=n_cases)


def two_hours_served(options: SimulateOptions, overhead: float, slot_s: float) -> Scenario:
    """Who serves them."""
    profiles = load_profiles(data_file("h100_llada.json"))
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    spec = ClusterSpec(groups=parse_mix(f"{N_GPUS}xtp1"), overhead=overhead)
    return Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, None),
        adviser=lambda workload: stand_in(table, workload, options),
        slot_s=slot_s / LOOKS_PER_SLOT,
    )


def parts_of_day(slot_s: float) -> dict[str, tuple[float, float]]:
    """From when to when: loaded, low and all."""
    loaded_at, end = LOADED_FROM * slot_s, float("inf")
    return {"loaded": (loaded_at, end), "low": (0.0, loaded_at), "all": (0.0, end)}
