"""Why TP degrees have to be mixed (the paper's Figure 4): what parallelism does to the latency of a
lone request (a), and to that of a cluster of 8 GPUs as load grows (b).

Step counts are those recorded with blocks of 32, also where blocks are 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import process_time
from typing import Literal

import msgspec
from matplotlib.figure import Figure

from dilaserve.messages import CacheMode
from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.data.tp_effect import TpEffect, tp_effect
from dilaserve_bench.experiments.document import DIGITS, Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table, number, percent
from dilaserve_bench.experiments.plots import panels
from dilaserve_bench.twin.cluster import ClusterSpec, parse_mix
from dilaserve_bench.twin.options import (
    SimulateOptions,
    core_settings,
    make_policy,
    recorded_source,
)
from dilaserve_bench.twin.recorded import load_steps
from dilaserve_bench.twin.report import RunReport, estimate, report_run
from dilaserve_bench.twin.simulation import Scenario, Simulation
from dilaserve_bench.twin.workload import RequestClass, poisson

__all__ = ["FIGURE_4", "DegreeRow"]

N_PROMPT, N_OUTPUT = 1075, 256
DEGREES = (1, 2, 4)
MODES: dict[str, tuple[CacheMode, int]] = {
    "no_cache": ("none", 32),
    "cache32": ("dual", 32),
    "cache8": ("dual", 8),
}
"""Cache mode and block length, under their published names."""
CONFIGURATIONS = ("2xtp4", "8xtp1")
LONE_RATE = 0.01
OVERHEAD = 1.0
"""The fitted overhead stands for what a loaded system loses, and published latencies of lone
requests are below it."""
N_LONE, N_LOADED = 40, 240
QUICK_LONE, QUICK_LOADED = 2, 8


class DegreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds and requests."""

    part: Literal["a", "b"]
    instances: str
    mode: str
    """One of MODES."""
    rate: float
    """Arrivals a second, of the cluster."""
    mean_s: float
    ci95: float | None
    relative: float | None
    """Part a: to TP-1."""
    published_s: float | None
    published_relative: float | None


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    instances: str
    mode: str
    rate: float
    n_requests: int
    overhead: float
    seed: int


def run(session: Session) -> Document[DegreeRow]:
    """Both parts."""
    published, overhead = tp_effect(), session.options.overhead or OVERHEAD
    lone = [_row(session, "a", f"1xtp{d}", m, LONE_RATE, overhead) for m in MODES for d in DEGREES]
    loaded = [
        _row(session, "b", configuration, mode, rate, overhead)
        for mode in ("no_cache", "cache32")
        for configuration in CONFIGURATIONS
        for rate in published.rates
    ]
    rows = [row for row in [*_related(lone), *loaded] if row is not None]
    return session.document(
        "fig4",
        rows,
        n=session.size(N_LOADED, QUICK_LOADED),
        published=published,
        found={"overhead": overhead, "lone_requests": session.size(N_LONE, QUICK_LONE)},
    )


def _row(
    session: Session,
    part: Literal["a", "b"],
    instances: str,
    mode: str,
    rate: float,
    overhead: float,
) -> DegreeRow | None:
    sizes = (N_LONE, QUICK_LONE) if part == "a" else (N_LOADED, QUICK_LOADED)
    keys = [
        _Key(
            instances=instances,
            mode=mode,
            rate=rate,
            n_requests=session.size(*sizes),
            overhead=overhead,
            seed=seed,
        )
        for seed in session.seeds
    ]
    session.watch.expect(len(keys))
    reports = [session.measured(key, RunReport, partial(_measure, key)) for key in keys]
    mean = estimate(report.mean_s for report in reports if report is not None)
    if mean is None:
        return None
    published_s, published_relative = _published(part, instances, mode, rate)
    return DegreeRow(
        part=part,
        instances=instances,
        mode=mode,
        rate=rate,
        mean_s=round(mean.mean, DIGITS),
        ci95=None if mean.ci95 is None else round(mean.ci95, DIGITS),
        relative=None,
        published_s=published_s,
        published_relative=published_relative,
    )


def _published(
    part: str, instances: str, mode: str, rate: float
) -> tuple[float | None, float | None]:
    """Seconds, and as a share of those of TP-1."""
    published: TpEffect = tp_effect()
    if part == "a":
        lone = published.lone_s[mode]
        seconds = lone[DEGREES.index(int(instances.removeprefix("1xtp")))]
        return seconds, round(seconds / lone[0], 3)
    return published.loaded_s[instances][published.rates.index(rate)], None


def _related(rows: Sequence[DegreeRow | None]) -> list[DegreeRow]:
    known = [row for row in rows if row is not None]
    alone = {row.mode: row.mean_s for row in known if row.instances == "1xtp1"}
    return [
        msgspec.structs.replace(row, relative=round(row.mean_s / alone[row.mode], DIGITS))
        for row in known
        if row.mode in alone
    ]


def _measure(key: _Key) -> RunReport:
    profiles = load_profiles(data_file("h100_llada.json"))
    table = load_steps(data_file("gsm8k_llada_steps.json"))
    cache_mode, block_length = MODES[key.mode]
    spec = ClusterSpec(
        groups=parse_mix(key.instances),
        overhead=key.overhead,
        cache_mode=cache_mode,
        block_length=block_length,
    )
    options = SimulateOptions(policy="infaas")
    scenario = Scenario(
        cluster=spec,
        profiles=profiles,
        policy=lambda: make_policy(options, profiles),
        source=lambda workload: recorded_source(table, workload),
        core=core_settings(spec.heartbeat_s, None),
    )
    size = RequestClass(n_prompt=N_PROMPT, n_output=N_OUTPUT)
    workloads = poisson([size], rate=key.rate, n=key.n_requests, n_cases=len(table.rows))
    done = Simulation(scenario, workloads(key.seed), key.seed, timer=process_time).run()
    return msgspec.structs.replace(report_run(done), percentiles_s=[], slots=[])


# --- what it says ---------------------------------------------------------------------------------


def page(document: Document[DegreeRow]) -> Page:
    """Both parts, beside the published."""
    lone = [row for row in document.rows if row.part == "a"]
    loaded = [row for row in document.rows if row.part == "b"]
    head = ("", "instances", "mean s", "of TP-1", "published s", "of TP-1")
    found = document.found
    return Page(
        [
            Table(head, [_lone_cells(row) for row in lone], "(a) A lone request"),
            Table(_loaded_head(), _loaded_rows(loaded), "(b) 8 GPUs: mean latency in seconds"),
        ],
        [
            f"Prompts of {N_PROMPT:,} tokens, output {N_OUTPUT}, threshold 0.9, infaas, step "
            f"overhead {found['overhead']}; (a) {found['lone_requests']} requests, (b) "
            f"{document.n} requests a point.",
            "Published, on GH200 with CUDA graphs, of a workload that is not stated; (b) is of "
            "one cache mode that is not stated, either.",
        ],
    )


def _lone_cells(row: DegreeRow) -> list[str]:
    return [
        row.mode,
        row.instances,
        number(row.mean_s, 2),
        percent(row.relative, 0),
        number(row.published_s, 2),
        percent(row.published_relative, 0),
    ]


def _loaded_head() -> list[str]:
    head = ["requests a second"]
    for mode in ("no_cache", "cache32"):
        head += [f"{configuration}, {mode}" for configuration in CONFIGURATIONS]
    return [*head, *(f"{configuration}, published" for configuration in CONFIGURATIONS)]


def _loaded_rows(rows: Sequence[DegreeRow]) -> list[list[str]]:
    found = {(row.rate, row.mode, row.instances): row for row in rows}
    lines = []
    for rate in dict.fromkeys(row.rate for row in rows):
        ours = [
            number(found[rate, mode, c].mean_s, 2) if (rate, mode, c) in found else ""
            for mode in ("no_cache", "cache32")
            for c in CONFIGURATIONS
        ]
        theirs = [number(_published("b", c, "", rate)[0], 2) for c in CONFIGURATIONS]
        lines.append([number(rate, 2), *ours, *theirs])
    return lines


def draw(document: Document[DegreeRow]) -> Figure:
    """(a) as shares of TP-1, (b) by load."""
    figure, (lone, loaded) = panels(["latency of a lone request / TP-1", "8 GPUs: mean latency, s"])
    for mode in MODES:
        rows = [row for row in document.rows if row.part == "a" and row.mode == mode]
        degrees = [int(row.instances.removeprefix("1xtp")) for row in rows]
        (line,) = lone.plot(degrees, [row.relative or 0.0 for row in rows], "o-", label=mode)
        theirs = [row.published_relative or 0.0 for row in rows]
        lone.plot(degrees, theirs, "x--", color=line.get_color())
    for configuration in CONFIGURATIONS:
        rows = [
            row
            for row in document.rows
            if row.part == "b" and row.mode == "no_cache" and row.instances == configuration
        ]
        rates = [row.rate for row in rows]
        (line,) = loaded.plot(rates, [row.mean_s for row in rows], "o-", label=configuration)
        published = [row.published_s or 0.0 for row in rows]
        loaded.plot(rates, published, "x--", color=line.get_color())
    lone.set_xlabel("TP degree (dashed: published)")
    lone.set_xticks(DEGREES)
    loaded.set_xlabel("requests a second, no cache (dashed: published)")
    for axes in (lone, loaded):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


FIGURE_4 = Experiment(
    name="fig4",
    what="TP degrees: latency of a lone request, and of 8 GPUs as load grows",
    paper="Figure 4",
    row=DegreeRow,
    run=run,
    page=page,
    draw=draw,
    takes=frozenset({"overhead"}),
    n_seeds=3,
)
