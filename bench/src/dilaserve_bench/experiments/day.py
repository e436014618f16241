"""The paper's 2-hour trace with a planner: one run for each system, cut into its parts and slots.

Arrivals are scaled as in `realday`. A system with `+plans` behind its policy's name re-plans its TP
degrees every slot, with our planner; one with `+eager` does so for a gain of 5 % instead of 10 %.
All begin with 16 × TP-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import process_time

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file
from dilaserve_bench.experiments.document import DIGITS
from dilaserve_bench.experiments.experiment import Session
from dilaserve_bench.experiments.spans import mean_threshold
from dilaserve_bench.experiments.two_hours import (
    OVERHEAD,
    PEAK,
    QUICK_SLOT_S,
    SLO_S,
    parts_of_day,
    two_hours,
    two_hours_served,
)
from dilaserve_bench.twin.cluster import ClusterSpec
from dilaserve_bench.twin.configurations import Configuration, PlanNote
from dilaserve_bench.twin.options import SimulateOptions
from dilaserve_bench.twin.report import quantile
from dilaserve_bench.twin.simulation import Replan, Run, Simulation
from dilaserve_scheduler.policies import POLICIES

__all__ = ["SYSTEMS", "Day", "Part", "days", "policy_of"]

MIN_GAINS = {"plans": 0.1, "eager": 0.05}
"""What a change has to bring, by what stands behind the + of a system's name."""
SYSTEMS = (
    "infaas",
    "llumnix",
    "tediserve+plans",
    "dilaserve",
    "dilaserve+plans",
    "dilaserve+eager",
)
QUICK_START_UP = "0/1+0.5"
"""Half a second, where the whole day takes two minutes."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrived in a span of time. Latencies are of those that were served."""

    n: int
    attainment: float | None
    mean_s: float | None
    p99_s: float | None
    mean_threshold: float | None
    """Over the steps that ended in it."""


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one run."""

    slot_s: float
    parts: dict[str, Part]
    """loaded, low and all."""
    slots: list[Part]
    configurations: list[Configuration]
    plans: list[PlanNote]
    n_lost: int
    """Requests that were not served to the end."""
    n_rebuilds: int
    cpu_s: float


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on."""

    system: str
    peak: float
    overhead: float
    slot_s: float
    seed: int = 0


def days(session: Session) -> dict[str, Day]:
    """By system, those that were not interrupted. Of the rates given, the first is the peak."""
    (peak, *_) = session.options.rates or (PEAK,)
    slot_s = QUICK_SLOT_S if session.is_quick else average_day().slot_s
    keys = [
        _Key(
            system=_known(system),
            peak=peak,
            overhead=session.options.overhead or OVERHEAD,
            slot_s=slot_s,
        )
        for system in session.options.policies or SYSTEMS
    ]
    session.measure_together(keys, Day, _alone)
    session.watch.expect(len(keys))
    found = {
        key.system: session.measured(key, Day, partial(_watched, key, session)) for key in keys
    }
    return {system: day for system, day in found.items() if day is not None}


def policy_of(system: str) -> str:
    """Without what stands behind the +."""
    return system.partition("+")[0]


def _known(system: str) -> str:
    policy, plus, how = system.partition("+")
    if policy not in POLICIES or (plus and how not in MIN_GAINS):
        raise DiLaServeError(
            f"--policies {system!r} is no policy; use one of {', '.join(sorted(POLICIES))}, with "
            "+plans or +eager behind it for one that re-plans"
        )
    return system


def _watched(key: _Key, session: Session) -> Day | None:
    simulation = _simulation(key)
    with session.watch.follow(simulation, f"a day of {key.system}") as look:
        done = simulation.run(look)
    return _kept(done, key.slot_s) if done.is_complete else None


def _alone(key: _Key) -> Day:
    """In a process of its own."""
    return _kept(_simulation(key).run(), key.slot_s)


def _simulation(key: _Key) -> Simulation:
    options = _options(key)
    scenario = two_hours_served(options, key.overhead, key.slot_s)
    if options.replan:
        scenario = replace(scenario, replan=_replan(options, scenario.cluster))
    workload = two_hours(key.peak, key.slot_s)(key.seed)
    return Simulation(scenario, workload, key.seed, timer=process_time)


def _options(key: _Key) -> SimulateOptions:
    policy, plus, how = key.system.partition("+")
    options = SimulateOptions(
        policy=policy,
        slo_s=SLO_S,
        replan=bool(plus),
        replan_every_s=key.slot_s,
        min_gain=MIN_GAINS.get(how, 0.1),
    )
    is_quick = key.slot_s == QUICK_SLOT_S
    return msgspec.structs.replace(options, start_up=QUICK_START_UP) if is_quick else options


def _replan(options: SimulateOptions, spec: ClusterSpec) -> Replan:
    from dilaserve_bench.twin.replan_options import make_replan

    profiles = load_profiles(data_file("h100_llada.json"))
    return make_replan(options, spec, profiles, data_file("gsm8k_llada_steps.json"))


def _kept(done: Run, slot_s: float) -> Day:
    n_slots = len(average_day().rates)
    return Day(
        slot_s=slot_s,
        parts={name: _part(done, *span) for name, span in parts_of_day(slot_s).items()},
        slots=[_part(done, slot * slot_s, (slot + 1) * slot_s) for slot in range(n_slots)],
        configurations=list(done.configurations),
        plans=list(done.plans),
        n_lost=sum(served.outcome != "done" for served in done.served),
        n_rebuilds=done.measured.n_rebuilds,
        cpu_s=round(done.wall_s, 1),
    )


def _part(run: Run, start_s: float, end_s: float) -> Part:
    arrived = [served for served in run.served if start_s <= served.arrival.at_s < end_s]
    latencies = sorted(served.latency_s for served in arrived if served.outcome == "done")
    return Part(
        n=len(arrived),
        attainment=_mean([float(served.in_time) for served in arrived]),
        mean_s=_mean(latencies),
        p99_s=_rounded(quantile(latencies, 0.99)),
        mean_threshold=_rounded(mean_threshold(run, start_s, end_s)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), DIGITS) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
