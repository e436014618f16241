"""The planner against an oracle (beside the paper's Figure 12): what Stage 1 chooses for a window
of the average day, and what every static mix of TP degrees does in it in the twin.

The planner is told the window's own arrival rates, so that only its model is judged, and not how
well the last five minutes foretell the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from time import process_time

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file
from dilaserve_bench.data import sharegpt_classes as sharegpt
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number, percent
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
from dilaserve_reconfigurator.decision import Costs
from dilaserve_reconfigurator.monitor import Workload
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.snapshot import RequestClass as PlannedClass

__all__ = ["EXPERIMENT", "Outcome", "WindowRow", "mixes"]

NODES = (4, 4, 4, 4)
DEGREES = (1, 2, 4)
SLO_S = 12.5
OVERHEAD = 1.594
"""The step overhead that `calibration` fits; planner and twin both have it."""
WINDOW_S, QUICK_S = 60.0, 3.0
"""Arrivals of each window that are tried: a fifth of its five minutes, for 300 runs."""
EVERY = 2
"""Every other of the day's 24 windows: 12."""
SAME_ATTAINMENT = 0.005
"""Mixes whose attainments are as near as this are told apart by their latency."""
PUBLISHED_SPLIT = range(4, 10)
"""Windows for which the published planner chose 8 × TP-1 + 2 × TP-4 (minutes 17.5 to 51.7 of its
timeline); for all others 16 × TP-1."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One static mix in one window."""

    mix: str
    attainment: float
    mean_s: float
    mean_threshold: float


class WindowRow(msgspec.Struct, frozen=True, kw_only=True):
    """One window of the day."""

    window: int
    rate: float
    """Arrivals a second."""
    chosen: Outcome
    """What the planner would run if changes cost nothing."""
    kept: Outcome
    """What it runs, the windows before and the 10 % rule being what they are."""
    best: Outcome
    """The highest attainment; among equals the shortest mean latency."""
    published: Outcome
    """What the published planner chose at this time of the day."""
    regret: float
    """Of `chosen`: how much longer its mean latency is than the best's, as a share."""
    attainment_regret: float
    """How much lower its attainment is, as a share."""
    kept_regret: float
    published_regret: float


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    mix: str
    rate: float
    window_s: float
    overhead: float
    seed: int


def run(session: Session) -> Document[WindowRow]:
    """All mixes in all windows, and the planner's choice for each."""
    overhead = session.options.overhead or OVERHEAD
    window_s = WINDOW_S if not session.is_quick else QUICK_S
    windows = list(enumerate(average_day().rates))[:: EVERY if not session.is_quick else 12]
    names = [name(counts) for counts in mixes()]
    keys = [
        _Key(mix=mix, rate=rate, window_s=window_s, overhead=overhead, seed=session.seeds[0])
        for _, rate in windows
        for mix in names
    ]
    session.measure_together(keys, RunReport, _alone)
    session.watch.expect(len(keys))
    found: dict[tuple[str, float], Outcome] = {}
    for key in keys:
        report = session.measured(key, RunReport, partial(_alone, key))
        if report is not None:
            found[key.mix, key.rate] = _outcome(key.mix, report)
    rows = list(_rows(windows, names, found, overhead))
    return session.document(
        "planning",
        rows,
        n=len(names),
        found={
            "overhead": overhead,
            "slo_s": SLO_S,
            "window_s": window_s,
            "largest_regret": max((row.regret for row in rows), default=None),
        },
    )


def mixes() -> Iterator[dict[int, int]]:
    """All that leave no GPU idle."""
    n_gpus = sum(NODES)
    for fours in range(n_gpus // 4 + 1):
        for twos in range((n_gpus - 4 * fours) // 2 + 1):
            yield {1: n_gpus - 4 * fours - 2 * twos, 2: twos, 4: fours}


def name(counts: dict[int, int]) -> str:
    """As `dilaserve simulate` writes it."""
    return ",".join(f"{n}xtp{degree}" for degree, n in sorted(counts.items()) if n)


# --- one window -----------------------------------------------------------------------------------


def _alone(key: _Key) -> RunReport:
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    profiles = load_profiles(data_file("h100_llada.json"))
    spec = ClusterSpec(groups=parse_mix(key.mix), overhead=key.overhead)
    options = SimulateOptions(policy="dilaserve", slo_s=SLO_S)
    scenario = Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, None),
        adviser=lambda workload: stand_in(table, workload, options),
    )
    classes = [
        RequestClass(n_prompt=p, n_output=o, weight=weight, slo_s=SLO_S)
        for p, o, weight in sharegpt().classes
    ]
    workloads = daily(classes, rates=[key.rate], slot_s=key.window_s, n_cases=len(table.rows))
    done = Simulation(scenario, workloads(key.seed), key.seed, timer=process_time).run()
    return msgspec.structs.replace(report_run(done), percentiles_s=[], slots=[])


def _outcome(mix: str, report: RunReport) -> Outcome:
    return Outcome(
        mix=mix,
        attainment=round(report.attainment, DIGITS),
        mean_s=round(report.mean_s or float("inf"), DIGITS),
        mean_threshold=round(report.mean_threshold or 0.0, DIGITS),
    )


# --- what the planner says ------------------------------------------------------------------------


def _rows(
    windows: Sequence[tuple[int, float]],
    names: Sequence[str],
    found: dict[tuple[str, float], Outcome],
    overhead: float,
) -> Iterator[WindowRow]:
    kept = {1: sum(NODES), 2: 0, 4: 0}
    for window, rate in windows:
        if any((mix, rate) not in found for mix in names):
            return  # interrupted
        chosen = _choose(rate, overhead, kept, min_gain=0.0)
        kept = _choose(rate, overhead, kept, min_gain=0.1)
        best = _best(found[mix, rate] for mix in names)
        split = "8xtp1,2xtp4" if window in PUBLISHED_SPLIT else "16xtp1"
        yield _row(
            window,
            rate,
            (found[name(chosen), rate], found[name(kept), rate]),
            best,
            found[split, rate],
        )


def _choose(
    rate: float, overhead: float, present: dict[int, int], *, min_gain: float
) -> dict[int, int]:
    options = PlannerOptions(
        profiles=load_profiles(data_file("h100_llada.json")),
        paces=load_paces(data_file("gsm8k_llada_steps.json")),
        degrees=DEGREES,
        overhead=overhead,
        costs=Costs(min_gain=min_gain),
    )
    total = sum(weight for _, _, weight in sharegpt().classes)
    workload = Workload(
        classes=tuple(
            PlannedClass(n_prompt=p, n_output=o, slo_s=SLO_S, rate=rate * weight / total)
            for p, o, weight in sharegpt().classes
        ),
        seen_s=WINDOW_S,
        n_requests=0,
    )
    cluster = Cluster(NODES, place(NODES, present))
    return dict(Planner(options, lambda: "").plan(0.0, workload, cluster).target.counts)


def _best(outcomes: Iterable[Outcome]) -> Outcome:
    found = list(outcomes)
    highest = max(outcome.attainment for outcome in found)
    equal = [each for each in found if each.attainment >= highest - SAME_ATTAINMENT]
    return min(equal, key=lambda outcome: outcome.mean_s)


def _row(
    window: int, rate: float, ours: tuple[Outcome, Outcome], best: Outcome, published: Outcome
) -> WindowRow:
    chosen, kept = ours
    return WindowRow(
        window=window,
        rate=rate,
        chosen=chosen,
        kept=kept,
        best=best,
        published=published,
        regret=_regret(chosen, best),
        attainment_regret=round(1.0 - chosen.attainment / best.attainment, DIGITS),
        kept_regret=_regret(kept, best),
        published_regret=_regret(published, best),
    )


def _regret(outcome: Outcome, best: Outcome) -> float:
    return round(outcome.mean_s / best.mean_s - 1.0, DIGITS)


def page(document: Document[WindowRow]) -> Page:
    """A line for each window."""
    head = ("window", "rate", "chosen", "mean s", "best", "mean s", "regret", "attainment",
            "kept", "regret", "published", "regret")  # fmt: skip
    rows = [
        [
            str(row.window),
            number(row.rate, 2),
            row.chosen.mix,
            number(row.chosen.mean_s, 2),
            row.best.mix,
            number(row.best.mean_s, 2),
            percent(row.regret),
            number(row.chosen.attainment),
            row.kept.mix,
            percent(row.kept_regret),
            row.published.mix,
            percent(row.published_regret),
        ]
        for row in document.rows
    ]
    found = document.found
    return Page(
        [Table(head, rows)],
        [
            f"{document.n} mixes of 16 H100, {found['window_s']:g} s of each window, SLO "
            f"{found['slo_s']} s, step overhead {found['overhead']}. Rates are of the cluster; "
            "regret: mean latency above the best's.",
            "chosen: without the 10 % rule; kept: with it, from 16 × TP-1 on.",
        ],
    )


EXPERIMENT = Experiment(
    name="planning",
    what="the planner's mixes against the best static ones, through the average day",
    paper="",
    row=WindowRow,
    run=run,
    page=page,
    takes=frozenset({"overhead"}),
    n_seeds=1,
)
