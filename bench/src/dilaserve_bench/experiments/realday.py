"""The paper's 2-hour trace (Figures 8 and 9, Table 5) under each policy, without a planner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import process_time

import msgspec
from matplotlib.figure import Figure

from dilaserve_bench.data import PublishedDays, average_day, published_days
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number, points
from dilaserve_bench.experiments.plots import colour, panels
from dilaserve_bench.experiments.spans import SpanReport, report_span, report_spans
from dilaserve_bench.experiments.two_hours import (
    LOADED_FROM,
    LOOKS_PER_SLOT,
    N_GPUS,
    OVERHEAD,
    PEAK,
    QUICK_SLOT_S,
    SLO_S,
    parts_of_day,
    two_hours,
    two_hours_served,
)
from dilaserve_bench.twin.options import SimulateOptions
from dilaserve_bench.twin.simulation import Run, Simulation

__all__ = ["EXPERIMENT", "DayRow", "DayRun"]

POLICIES = ("infaas", "llumnix", "tediserve", "proteus", "dilaserve")


class DayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one part of the day. Latencies are those of requests that were served."""

    policy: str
    period: str
    """loaded, low or all; by the time of arrival."""
    rate: float
    """Mean arrivals a second, per GPU."""
    attainment: float | None
    ci95: float | None = None
    """None: there is one day."""
    mean_threshold: float | None
    """Over the steps that ended in the period."""
    accuracy: float | None = None
    """None: steps were recorded, there are no answers."""
    p50_s: float | None
    p99_s: float | None
    n: int
    """Requests."""
    cpu_s: float
    """Of one core, for the whole day."""


class DayRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one run: the parts of the day by name, and its minutes."""

    periods: dict[str, SpanReport]
    minutes: list[SpanReport]
    cpu_s: float


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on."""

    policy: str
    peak: float
    overhead: float
    slot_s: float
    seed: int = 0


def run(session: Session) -> Document[DayRow]:
    """One day for each policy. Of the rates given, the first is the peak."""
    (peak, *_) = session.options.rates or (PEAK,)
    overhead = session.options.overhead or OVERHEAD
    slot_s = QUICK_SLOT_S if session.is_quick else average_day().slot_s
    keys = [
        _Key(policy=policy, peak=peak, overhead=overhead, slot_s=slot_s)
        for policy in session.options.policies or POLICIES
    ]
    session.measure_together(keys, DayRun, _alone)
    days = [session.measured(key, DayRun, partial(_watched, key, session)) for key in keys]
    runs = {key.policy: day for key, day in zip(keys, days, strict=True) if day is not None}
    return session.document(
        "realday",
        _rows(runs, slot_s),
        n=max((day.periods["all"].n for day in runs.values()), default=0),
        published=published_days(),
        found={
            "peak": peak,
            "overhead": overhead,
            "slo_s": SLO_S,
            "minutes": {policy: _course(day) for policy, day in runs.items()},
        },
    )


# --- one day --------------------------------------------------------------------------------------


def _watched(key: _Key, session: Session) -> DayRun | None:
    simulation = _simulation(key)
    with session.watch.follow(simulation, f"a day of {key.policy}") as look:
        done = simulation.run(look)
    return _kept(done, key.slot_s) if done.is_complete else None


def _alone(key: _Key) -> DayRun:
    """In a process of its own."""
    return _kept(_simulation(key).run(), key.slot_s)


def _simulation(key: _Key) -> Simulation:
    options = SimulateOptions(policy=key.policy, slo_s=SLO_S)
    scenario = two_hours_served(options, key.overhead, key.slot_s)
    workload = two_hours(key.peak, key.slot_s)(key.seed)
    return Simulation(scenario, workload, key.seed, timer=process_time)


def _kept(done: Run, slot_s: float) -> DayRun:
    parts = parts_of_day(slot_s)
    return DayRun(
        periods={name: report_span(done, *span) for name, span in parts.items()},
        minutes=report_spans(done, slot_s / LOOKS_PER_SLOT),
        cpu_s=round(done.wall_s, 1),
    )


# --- what it says ---------------------------------------------------------------------------------


def _rows(runs: Mapping[str, DayRun], slot_s: float) -> list[DayRow]:
    n_slots = len(average_day().rates)
    lengths = {"loaded": n_slots - LOADED_FROM, "low": LOADED_FROM, "all": n_slots}
    return [
        DayRow(
            policy=policy,
            period=period,
            rate=round(span.n / (N_GPUS * n * slot_s), 4),
            attainment=span.attainment,
            mean_threshold=span.mean_threshold,
            p50_s=span.p50_s,
            p99_s=span.p99_s,
            n=span.n,
            cpu_s=day.cpu_s,
        )
        for period, n in lengths.items()
        for policy, day in runs.items()
        for span in [day.periods[period]]
    ]


def _course(day: DayRun) -> dict[str, list[float | None]]:
    return {
        "attainment": [minute.attainment for minute in day.minutes],
        "mean_threshold": [minute.mean_threshold for minute in day.minutes],
        "n": [minute.n for minute in day.minutes],
    }


def page(document: Document[DayRow]) -> Page:
    """Ours, published, and the difference in points."""
    published = published_days()
    head = ("policy", "part", "rate", "attainment", "published", "points", "threshold",
            "p50 s", "p99 s", "CPU s")  # fmt: skip
    rows = [_cells(row, published) for row in document.rows]
    found = document.found
    return Page(
        [Table(head, rows)],
        [
            f"{document.n} requests, SLO {found['slo_s']} s, step overhead {found['overhead']}, "
            f"peak {found['peak']} requests a second and GPU; loaded: minutes 45 to 120",
        ],
    )


def _cells(row: DayRow, published: PublishedDays) -> list[str]:
    theirs = published.systems.get(row.policy)
    beside = {"loaded": theirs.loaded, "low": theirs.low}.get(row.period) if theirs else None
    return [
        row.policy,
        row.period,
        number(row.rate),
        number(row.attainment),
        number(beside),
        points(row.attainment, beside),
        number(row.mean_threshold),
        number(row.p50_s, 2),
        number(row.p99_s, 2),
        number(row.cpu_s, 0),
    ]


def draw(document: Document[DayRow]) -> Figure:
    """Attainment and mean threshold by minute, in means of three; dashed as published."""
    figure, (attainment, threshold) = panels(["SLO attainment", "mean threshold"])
    published = published_days()
    for policy, course in document.found["minutes"].items():
        attainment.plot(*_smooth(course["attainment"]), color=colour(policy), label=policy)
        threshold.plot(*_smooth(course["mean_threshold"]), color=colour(policy))
        theirs = published.systems.get(policy)
        if theirs is not None:
            for axes, line in (
                (attainment, theirs.attainment), (threshold, theirs.mean_threshold)
            ):  # fmt: skip
                minutes = [published.slot_s / 60 * (n + 0.5) for n in range(len(line))]
                axes.plot(minutes, line, "--", color=colour(policy), linewidth=0.7)
    for axes in (attainment, threshold):
        axes.set_xlabel("minute of the trace (dashed: published)")
    attainment.legend(fontsize=8)
    return figure


def _smooth(values: list[float | None], n: int = 3) -> tuple[list[float], list[float]]:
    """(minute, mean of the known values around it)."""
    groups = [values[at : at + n] for at in range(0, len(values), n)]
    known = [(n * k + n / 2, [v for v in g if v is not None]) for k, g in enumerate(groups)]
    return [at for at, vs in known if vs], [sum(vs) / len(vs) for _, vs in known if vs]


EXPERIMENT = Experiment(
    name="realday",
    what="two hours of a real day: attainment and thresholds under a changing load",
    paper="Table 5",
    row=DayRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead", "policies", "rates"}),
    n_seeds=1,
)
