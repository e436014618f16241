"""What the planner chooses through the average day at several loads (the paper's Figure 12).

As there, arrivals are fed to the workload monitor, the planner plans every slot, and nothing is
served: what is planned is taken to run at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from matplotlib.figure import Figure

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.data import sharegpt_classes as sharegpt
from dilaserve_bench.data.reconfig import DEGREES, published_plans
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number
from dilaserve_bench.experiments.plots import panels
from dilaserve_bench.twin.workload import Arrival, RequestClass, daily
from dilaserve_reconfigurator.monitor import Monitor
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place

__all__ = ["FIGURE_12", "PlanRow"]

NODES = (4, 4, 4, 4)
SLO_S = 12.5
OVERHEAD = 1.594
"""The step overhead that `calibration` fits."""
SIGN_OF_LIFE_S = 1.0
BUDGET_S = 3600.0
"""For a plan: never reached, so that the result does not depend on the machine."""
QUICK_SLOTS = 3


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of one day."""

    peak: int
    """Arrivals a second in the busiest slot."""
    slot: int
    """The plan is made at its begin, from the arrivals of the slot before it."""
    rate: float
    """Arrivals a second in that one."""
    mix: list[int]
    """Instances of TP-1, TP-2 and TP-4 from then on."""
    published: list[int]
    reason: str


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    peak: int
    overhead: float
    n_slots: int
    seed: int


class _Course(msgspec.Struct, frozen=True):
    """The plans of one day."""

    rows: list[PlanRow]


def run(session: Session) -> Document[PlanRow]:
    """A day for each of the published peaks."""
    plans = published_plans()
    n_slots = session.size(len(plans.rates), QUICK_SLOTS)
    keys = [
        _Key(
            peak=peak,
            overhead=session.options.overhead or OVERHEAD,
            n_slots=n_slots,
            seed=session.seeds[0],
        )
        for peak in plans.chosen
    ]
    session.measure_together(keys, _Course, _course)
    session.watch.expect(len(keys))
    courses = [session.measured(key, _Course, partial(_course, key)) for key in keys]
    rows = [row for course in courses if course is not None for row in course.rows]
    return session.document(
        "fig12",
        rows,
        n=len(rows),
        published=plans,
        found={
            "overhead": keys[0].overhead,
            "slo_s": SLO_S,
            "same": sum(row.mix == row.published for row in rows),
            "changes": _changes(rows),
        },
    )


def _course(key: _Key) -> _Course:
    published = published_plans()
    chosen, slot_s = published.chosen[key.peak], published.slot_s
    monitor = Monitor(window_s=slot_s, gap_s=2 * SIGN_OF_LIFE_S, slo_s=SLO_S)
    planner = Planner(_options(key.overhead), lambda: "")
    mix, rows = {1: sum(NODES), 2: 0, 4: 0}, []
    arrivals = _arrivals(key)
    for slot in range(1, key.n_slots):
        now = slot * slot_s
        n_arrived = _watch(monitor, arrivals, now, slot_s)
        cluster = Cluster(NODES, place(NODES, mix))
        record = planner.plan(now, monitor.workload(now), cluster)
        if record.verdict == "change":
            planner.changed(now, record)
            mix = {degree: record.target.counts.get(degree, 0) for degree in DEGREES}
        rows.append(
            PlanRow(
                peak=key.peak,
                slot=slot,
                rate=round(n_arrived / slot_s, 3),
                mix=[mix[degree] for degree in DEGREES],
                published=list(chosen[slot]),
                reason="; ".join(record.reasons),
            )
        )
    return _Course(rows)


def _options(overhead: float) -> PlannerOptions:
    return PlannerOptions(
        profiles=load_profiles(data_file("h100_llada.json")),
        paces=load_paces(data_file("gsm8k_llada_steps.json")),
        degrees=DEGREES,
        overhead=overhead,
        budget_s=BUDGET_S,
    )


def _arrivals(key: _Key) -> Sequence[Arrival]:
    plans = published_plans()
    rates = [rate * key.peak / plans.peak for rate in plans.rates[: key.n_slots]]
    classes = [
        RequestClass(n_prompt=p, n_output=o, weight=weight) for p, o, weight in sharegpt().classes
    ]
    return daily(classes, rates=rates, slot_s=plans.slot_s, n_cases=1)(key.seed)


def _watch(monitor: Monitor, arrivals: Sequence[Arrival], until_s: float, slot_s: float) -> int:
    """Feed a slot to the monitor; how many arrived."""
    due = [arrival for arrival in arrivals if until_s - slot_s <= arrival.at_s < until_s]
    signs = [(until_s - slot_s + n * SIGN_OF_LIFE_S, None) for n in range(1, int(slot_s) + 1)]
    told: list[tuple[float, Arrival | None]] = [*((each.at_s, each) for each in due), *signs]
    for at_s, arrival in sorted(told, key=lambda each: each[0]):
        if arrival is None:
            monitor.alive(at_s)
        else:
            monitor.arrived(
                at_s, arrival.request_id, arrival.n_prompt, arrival.n_output, arrival.slo_s
            )
    return len(due)


def _changes(rows: Sequence[PlanRow]) -> dict[str, dict[str, int]]:
    """How often the mix changes in a day, by peak."""
    changes = {}
    for peak, day in _by_peak(rows).items():
        start = list(published_plans().chosen[peak][0])
        ours = [start, *(row.mix for row in day)]
        theirs = [start, *(row.published for row in day)]
        changes[str(peak)] = {"ours": _n_changes(ours), "published": _n_changes(theirs)}
    return changes


def _n_changes(mixes: Sequence[Sequence[int]]) -> int:
    return sum(before != after for before, after in pairwise(mixes))


def _by_peak(rows: Sequence[PlanRow]) -> Mapping[int, list[PlanRow]]:
    return {
        peak: [row for row in rows if row.peak == peak]
        for peak in dict.fromkeys(row.peak for row in rows)
    }


def page(document: Document[PlanRow]) -> Page:
    """A line for each slot: for each peak what was seen, ours, and the published."""
    days = _by_peak(document.rows)
    head = ["minute"]
    for peak in days:
        head += [f"peak {peak}: rate", "ours", "published"]
    rows = []
    for slot in dict.fromkeys(row.slot for row in document.rows):
        cells = [str(5 * slot)]
        for day in days.values():
            (row,) = [row for row in day if row.slot == slot]
            cells += [number(row.rate, 2), _cell(row.mix), _cell(row.published)]
        rows.append(cells)
    found = document.found
    changes = "; ".join(
        f"peak {peak}: {n['ours']} ({n['published']})" for peak, n in found["changes"].items()
    )
    return Page(
        [Table(head, rows)],
        [
            "Instances of TP-1 · TP-2 · TP-4, from 16 · 0 · 0 on; rates are of the cluster, as "
            "seen in the 5 minutes before.",
            f"16 H100 in 4 nodes, SLO {found['slo_s']} s, step overhead {found['overhead']}; the "
            "published: 16 GH200.",
            f"The same mix in {found['same']} of {document.n}. Changes (published): {changes}.",
        ],
    )


def _cell(mix: Sequence[int]) -> str:
    return " · ".join(map(str, mix))


def draw(document: Document[PlanRow]) -> Figure:
    """How many GPUs are in TP-1 instances."""
    days = _by_peak(document.rows)
    figure, axes = panels([f"GPUs at TP-1, peak {peak} a second" for peak in days])
    for each, day in zip(axes, days.values(), strict=True):
        minutes = [5 * row.slot for row in day]
        each.step(minutes, [row.mix[0] for row in day], where="post", label="ours")
        each.step(minutes, [row.published[0] for row in day], "--", where="post", label="published")
        each.plot(minutes, [row.rate for row in day], color="grey", linewidth=0.8, label="rate")
        each.set_ylim(0, sum(NODES) + 1)
        each.set_xlabel("minute of the trace")
    axes[0].legend(fontsize=8)
    return figure


FIGURE_12 = Experiment(
    name="fig12",
    what="the planner's mixes through the day at four loads, beside the published ones",
    paper="Figure 12",
    row=PlanRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead"}),
    n_seeds=1,
)
