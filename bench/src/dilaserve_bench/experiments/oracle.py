"""The best static mix of TP degrees for a steady load, found in the twin by successive halving.

Every mix is tried on the first of the arrivals, the better ones on more of them, and the best ones
on all. Arrivals of a shorter trial are the first ones of a longer, so all trials are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.data import sharegpt_classes as sharegpt
from dilaserve_bench.experiments.document import DIGITS
from dilaserve_bench.experiments.experiment import Session
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
    stand_in,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import RunReport, report_run
from dilaserve_bench.twin.simulation import Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, daily

__all__ = ["Load", "Outcome", "Round", "best_of", "mix_name", "mixes", "search"]

SAME_ATTAINMENT = 0.005
"""Mixes whose attainments are as near as this are told apart by their latency."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One static mix under one load."""

    mix: str
    attainment: float
    mean_s: float
    mean_threshold: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """A steady one, of ShareGPT's classes: arrivals a second over `window_s`."""

    rate: float
    window_s: float
    slo_s: float
    overhead: float


@dataclass(frozen=True)
class Round:
    """All that are left are tried for `least_s`, or for longer if fewer than `least_n` arrive by
    then; `n_kept` of them go on."""

    least_s: float
    least_n: int
    n_kept: int

    def seconds(self, load: Load) -> float:
        """Of the load's window."""
        return min(max(self.least_s, round(self.least_n / load.rate)), load.window_s)


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that a trial depends on."""

    mix: str
    rate: float
    window_s: float
    slo_s: float
    overhead: float
    seed: int


def mixes(nodes: Sequence[int]) -> Iterator[dict[int, int]]:
    """All of TP-1, 2 and 4 that leave no GPU idle."""
    n_gpus = sum(nodes)
    for fours in range(n_gpus // 4 + 1):
        for twos in range((n_gpus - 4 * fours) // 2 + 1):
            yield {1: n_gpus - 4 * fours - 2 * twos, 2: twos, 4: fours}


def mix_name(counts: Iterable[tuple[int, int]]) -> str:
    """(degree, instances) as `dilaserve simulate` writes it."""
    return ",".join(f"{n}xtp{degree}" for degree, n in sorted(counts) if n)


def search(
    session: Session,
    load: Load,
    names: Sequence[str],
    always: Sequence[str],
    rounds: Iterable[Round],
) -> list[Outcome] | None:
    """Those that were tried on the whole window, the best first; `always` are among them. None if
    it was interrupted."""
    left = list(names)
    for each in rounds:
        found = _try(session, load, left, each.seconds(load))
        if found is None:
            return None
        left = [outcome.mix for outcome in ranked(found)[: each.n_kept]]
    finalists = [*left, *(mix for mix in dict.fromkeys(always) if mix not in left)]
    found = _try(session, load, finalists, load.window_s)
    return None if found is None else ranked(found)


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The best first: those that attain the most by their latency, the others by what they
    attain."""
    found = list(outcomes)
    enough = max(outcome.attainment for outcome in found) - SAME_ATTAINMENT
    return sorted(
        found,
        key=lambda o: (0, o.mean_s) if o.attainment >= enough else (1, -o.attainment),
    )


def best_of(outcomes: Iterable[Outcome]) -> Outcome:
    """The highest attainment; among equals the shortest mean latency."""
    return ranked(outcomes)[0]


# --- one trial ------------------------------------------------------------------------------------


def _try(
    session: Session, load: Load, names: Sequence[str], seconds: float
) -> list[Outcome] | None:
    by_mix = {name: [_key(load, name, seconds, seed) for seed in session.seeds] for name in names}
    keys = [key for keys in by_mix.values() for key in keys]
    session.measure_together(keys, RunReport, measure)
    session.watch.expect(len(keys))
    found = []
    for name in names:
        reports = [_measured(session, key) for key in by_mix[name]]
        known = [report for report in reports if report is not None]
        if len(known) < len(reports):
            return None
        found.append(_outcome(name, known))
    return found


def _key(load: Load, mix: str, seconds: float, seed: int) -> Key:
    return Key(
        mix=mix,
        rate=load.rate,
        window_s=seconds,
        slo_s=load.slo_s,
        overhead=load.overhead,
        seed=seed,
    )


def _measured(session: Session, key: Key) -> RunReport | None:
    return session.measured(key, RunReport, partial(_watched, key, session))


def _watched(key: Key, session: Session) -> RunReport | None:
    simulation = _simulation(key)
    title = f"{key.mix}, {key.window_s:g} s of {key.rate:g}/s"
    with session.watch.follow(simulation, title) as look:
        return _report(simulation, look)


def measure(key: Key) -> RunReport:
    """In a process of its own."""
    report = _report(_simulation(key), lambda: False)
    assert report is not None
    return report


def _report(simulation: Simulation, look: Callable[[], bool]) -> RunReport | None:
    done = simulation.run(look)
    if not done.is_complete:
        return None
    return msgspec.structs.replace(report_run(done), percentiles_s=[], slots=[])


def _simulation(key: Key) -> Simulation:
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    profiles = load_profiles(data_file("h100_llada.json"))
    spec = ClusterSpec(groups=parse_mix(key.mix), overhead=key.overhead)
    options = SimulateOptions(policy="dilaserve", slo_s=key.slo_s)
    scenario = Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, None),
        adviser=lambda workload: stand_in(table, workload, options),
    )
    classes = [
        RequestClass(n_prompt=p, n_output=o, weight=weight, slo_s=key.slo_s)
        for p, o, weight in sharegpt().classes
    ]
    workloads = daily(classes, rates=[key.rate], slot_s=key.window_s, n_cases=len(table.rows))
    return Simulation(scenario, workloads(key.seed), key.seed, timer=process_time)


def _outcome(mix: str, reports: Sequence[RunReport]) -> Outcome:
    """Means over seeds."""
    n = len(reports)
    return Outcome(
        mix=mix,
        attainment=round(sum(report.attainment for report in reports) / n, DIGITS),
        mean_s=round(sum(report.mean_s or float("inf") for report in reports) / n, DIGITS),
        mean_threshold=round(sum(report.mean_threshold or 0.0 for report in reports) / n, DIGITS),
    )
