"""The planner against an oracle (beside the paper's Figure 12): what Stage 1 chooses for a window
of the average day, and what static mixes of TP degrees do in it in the twin.

The planner is told the window's own arrival rates, so that only its model is judged, and not how
well the last five minutes foretell the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file
from dilaserve_bench.data import sharegpt_classes as sharegpt
from dilaserve_bench.data.reconfig import DEGREES, PublishedPlans, published_plans
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.oracle import Load, Outcome, Round, mix_name, mixes, search
from dilaserve_bench.experiments.page import Page, Table, number, percent
from dilaserve_reconfigurator.decision import Costs
from dilaserve_reconfigurator.monitor import Workload
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.snapshot import RequestClass as PlannedClass

__all__ = ["EXPERIMENT", "WindowRow", "workload_at"]

NODES = (4, 4, 4, 4)
SLO_S = 12.5
OVERHEAD = 1.594
"""The step overhead that `calibration` fits; planner and twin both have it."""
EVERY = 2
"""Every other of the day's 24 windows: 12."""
ROUNDS = (Round(12.0, 120, 5), Round(40.0, 400, 2))
QUICK_S, QUICK_EVERY = 3.0, 12
QUICK_ROUNDS = (Round(1.0, 1, 2),)


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
    """What the published planner chose at the nearest load of its Figure 12."""
    traced: Outcome
    """What the published system ran at this time of its headline trace."""
    regret: float
    """Of `chosen`: how much longer its mean latency is than the best's, as a share."""
    attainment_regret: float
    """How much lower its attainment is, as a share."""
    kept_regret: float
    published_regret: float
    traced_regret: float
    n_tried: int
    """Mixes that were tried on the whole window."""


def run(session: Session) -> Document[WindowRow]:
    """The planner's choice and the best mix, window by window."""
    overhead = session.options.overhead or OVERHEAD
    day, plans = average_day(), published_plans()
    names = [mix_name(counts.items()) for counts in mixes(NODES)]
    kept = {1: sum(NODES), 2: 0, 4: 0}
    rows = []
    every = QUICK_EVERY if session.is_quick else EVERY
    for window, rate in list(enumerate(day.rates))[::every]:
        if session.watch.is_stopped:
            break
        chosen = _choose(rate, overhead, kept, min_gain=0.0)
        kept = _choose(rate, overhead, kept, min_gain=0.1)
        candidates = {
            "chosen": mix_name(chosen.items()),
            "kept": mix_name(kept.items()),
            **_published(plans, rate, (window + 0.5) * day.slot_s / 60),
        }
        window_s = QUICK_S if session.is_quick else day.slot_s
        load = Load(rate=rate, window_s=window_s, slo_s=SLO_S, overhead=overhead)
        rounds = QUICK_ROUNDS if session.is_quick else ROUNDS
        found = search(session, load, names, list(candidates.values()), rounds)
        if found is not None:
            rows.append(_row(window, rate, candidates, found))
    return session.document(
        "planning",
        rows,
        n=len(names),
        published=plans,
        found={
            "overhead": overhead,
            "slo_s": SLO_S,
            "rounds": [(r.least_s, r.least_n, r.n_kept) for r in ROUNDS],
            "largest_regret": max((row.regret for row in rows), default=None),
            "largest_attainment_regret": max((r.attainment_regret for r in rows), default=None),
        },
    )


def workload_at(rate: float, slo_s: float, *, seen_s: float = 300.0) -> Workload:
    """What the monitor would report of ShareGPT's classes at so many arrivals a second."""
    classes = sharegpt().classes
    total = sum(weight for _, _, weight in classes)
    return Workload(
        classes=tuple(
            PlannedClass(n_prompt=p, n_output=o, slo_s=slo_s, rate=rate * weight / total)
            for p, o, weight in classes
        ),
        seen_s=seen_s,
        n_requests=round(rate * seen_s),
    )


def _choose(
    rate: float, overhead: float, present: Mapping[int, int], *, min_gain: float
) -> dict[int, int]:
    options = PlannerOptions(
        profiles=load_profiles(data_file("h100_llada.json")),
        paces=load_paces(data_file("gsm8k_llada_steps.json")),
        degrees=DEGREES,
        overhead=overhead,
        costs=Costs(min_gain=min_gain),
    )
    cluster = Cluster(NODES, place(NODES, present))
    record = Planner(options, lambda: "").plan(0.0, workload_at(rate, SLO_S), cluster)
    return dict(record.target.counts)


def _published(plans: PublishedPlans, rate: float, minute: float) -> dict[str, str]:
    return {
        "published": mix_name(zip(DEGREES, plans.at_rate(rate), strict=True)),
        "traced": mix_name(zip(DEGREES, plans.at_minute(minute), strict=True)),
    }


def _row(
    window: int, rate: float, candidates: Mapping[str, str], found: Iterable[Outcome]
) -> WindowRow:
    tried = list(found)
    best = tried[0]
    by_mix = {outcome.mix: outcome for outcome in tried}
    outcomes = {role: by_mix[mix] for role, mix in candidates.items()}
    return WindowRow(
        window=window,
        rate=rate,
        chosen=outcomes["chosen"],
        kept=outcomes["kept"],
        best=best,
        published=outcomes["published"],
        traced=outcomes["traced"],
        regret=_regret(outcomes["chosen"], best),
        attainment_regret=round(1.0 - outcomes["chosen"].attainment / best.attainment, DIGITS),
        kept_regret=_regret(outcomes["kept"], best),
        published_regret=_regret(outcomes["published"], best),
        traced_regret=_regret(outcomes["traced"], best),
        n_tried=len(tried),
    )


def _regret(outcome: Outcome, best: Outcome) -> float:
    return round(outcome.mean_s / best.mean_s - 1.0, DIGITS)


def page(document: Document[WindowRow]) -> Page:
    """A line for each window; what was published stands in a table of its own."""
    ours = ("window", "rate", "chosen", "mean s", "attainment", "best", "mean s", "attainment",
            "regret", "kept", "regret")  # fmt: skip
    theirs = ("window", "rate", "Figure 12", "mean s", "attainment", "regret", "its trace",
              "mean s", "attainment", "regret")  # fmt: skip
    found = document.found
    return Page(
        [
            Table(ours, [_ours(row) for row in document.rows]),
            Table(
                theirs, [_theirs(row) for row in document.rows], "What the published planner chose"
            ),
        ],
        [
            f"{document.n} mixes of 16 H100 in 4 nodes, SLO {found['slo_s']} s, step overhead "
            f"{found['overhead']}. Rates are of the cluster; regret: mean latency over the best's.",
            "chosen: without the 10 % rule; kept: with it, from 16 × TP-1 on.",
            "Figure 12: what it chose at the nearest load there (at most 8.1 a second), on GH200; "
            "its trace: what ran at this time of the day in Figure 8.",
            _rounds(found["rounds"]),
        ],
    )


def _rounds(rounds: Iterable[tuple[float, int, int]]) -> str:
    """How the best was looked for."""
    steps = [
        f"{seconds:g} s, or until {n} have arrived ({n_kept} go on)"
        for seconds, n, n_kept in rounds
    ]
    return (
        f"Tried on the first {', the rest on '.join(steps)}, those left and the four named ones on "
        "all 300 s; the same arrivals for all, one seed."
    )


def _ours(row: WindowRow) -> list[str]:
    return [
        str(row.window),
        number(row.rate, 2),
        *_cells(row.chosen),
        *_cells(row.best),
        percent(row.regret),
        row.kept.mix,
        percent(row.kept_regret),
    ]


def _theirs(row: WindowRow) -> list[str]:
    return [
        str(row.window),
        number(row.rate, 2),
        *_cells(row.published),
        percent(row.published_regret),
        *_cells(row.traced),
        percent(row.traced_regret),
    ]


def _cells(outcome: Outcome) -> list[str]:
    return [outcome.mix, number(outcome.mean_s, 2), number(outcome.attainment)]


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
