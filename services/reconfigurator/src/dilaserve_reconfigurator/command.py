"""`dilaserve plan`: plans for a class mix or a trace, and explanations of plans that were made."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from dilaserve.messages import CacheMode
from dilaserve.profiles import load_profiles
from dilaserve_reconfigurator.decision import Costs
from dilaserve_reconfigurator.explain import explain
from dilaserve_reconfigurator.monitor import Workload
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.record import PlanRecord, Plans
from dilaserve_reconfigurator.settings import degrees_of
from dilaserve_reconfigurator.snapshot import PlanningError
from dilaserve_reconfigurator.solving import SolverName
from dilaserve_reconfigurator.whatif import (
    mix_workload,
    parse_mix,
    parse_nodes,
    trace_workloads,
)

__all__ = ["plan"]


def plan(
    action: Annotated[
        Literal["explain"] | None, typer.Argument(help="explain: say how a plan came about.")
    ] = None,
    plan_id: Annotated[str, typer.Argument(help="Of the plan to explain.")] = "",
    mix: Annotated[Path | None, typer.Option(help="Class mix to plan for (JSON).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace to plan along (CSV).")] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second of the mix.")] = None,
    speed: Annotated[float, typer.Option(help="How much faster than recorded.")] = 1.0,
    interval: Annotated[float, typer.Option(help="Seconds between plans along a trace.")] = 300.0,
    slo: Annotated[float, typer.Option(help="SLO of all requests, in seconds.")] = 30.0,
    nodes: Annotated[str, typer.Option(help="GPUs by node, as in 4x8.")] = "1x8",
    present: Annotated[str, typer.Option(help="Mix that runs, as in 8xtp1; empty: none.")] = "",
    degrees: Annotated[str, typer.Option(help="TP degrees to choose from.")] = "1,2,4",
    profile: Annotated[Path | None, typer.Option(help="Latency profile.")] = None,
    steps: Annotated[Path | None, typer.Option(help="Recorded steps of the model.")] = None,
    cache: Annotated[CacheMode, typer.Option(help="KV cache mode.")] = "dual",
    budget: Annotated[int, typer.Option(help="Tokens of all requests of an instance.")] = 8192,
    overhead: Annotated[float, typer.Option(help="Factor on the latency profile.")] = 1.0,
    safety: Annotated[float, typer.Option(help="Factor on the rates.")] = 1.5,
    launch: Annotated[float, typer.Option(help="Seconds that a launch takes.")] = 60.0,
    min_gain: Annotated[float, typer.Option(help="What a change has to bring.")] = 0.1,
    time_limit: Annotated[float, typer.Option(help="Seconds for one plan.")] = 20.0,
    solver: Annotated[SolverName, typer.Option(help="highs or gurobi.")] = "highs",
    as_json: Annotated[bool, typer.Option("--json", help="A record a line.")] = False,
) -> None:
    """Plan the mix of TP degrees for a workload, or explain a plan. Changes nothing."""
    plans = Plans(_home() / "plans")
    if action == "explain":
        _show(plans.load(plan_id), as_json=as_json)
        return
    if profile is None or steps is None or (mix is None) == (trace is None):
        raise PlanningError("a plan needs --profile, --steps, and either --mix or --trace")
    options = PlannerOptions(
        profiles=load_profiles(profile),
        paces=load_paces(steps),
        degrees=degrees_of(degrees),
        cache_mode=cache,
        max_batch_tokens=budget,
        overhead=overhead,
        rate_factor=safety,
        budget_s=time_limit,
        solver=solver,
        costs=Costs(launch_s=launch, min_gain=min_gain),
    )
    given = _Given(mix, trace, rate, speed, interval, slo)
    running = _cluster(parse_nodes(nodes), parse_mix(present, options.degrees))
    for record in _along(Planner(options, _new_id), given.workloads(), running):
        plans.save(record)
        _show(record, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Given:
    mix: Path | None
    trace: Path | None
    rate: float | None
    speed: float
    interval_s: float
    slo_s: float

    def workloads(self) -> Iterator[tuple[float, Workload]]:
        """By the time at which they are known."""
        if self.mix is not None:
            yield 0.0, mix_workload(self.mix, slo_s=self.slo_s, rate=self.rate)
        elif self.trace is not None:
            yield from trace_workloads(
                self.trace, slo_s=self.slo_s, interval_s=self.interval_s, speed=self.speed
            )


def _along(
    planner: Planner, workloads: Iterator[tuple[float, Workload]], cluster: Cluster
) -> Iterator[PlanRecord]:
    """Plan after plan, as if each were carried out at once. Raises PlanningError for none."""
    record = None
    for now, workload in workloads:
        record = planner.plan(now, workload, cluster)
        if record.verdict == "change":
            planner.changed(now, record)
            cluster = _cluster(cluster.nodes, record.target.counts)
        yield record
    if record is None:
        raise PlanningError("the trace is too short for a plan; give a shorter --interval")


def _cluster(nodes: tuple[int, ...], counts: Mapping[int, int]) -> Cluster:
    return Cluster(nodes, place(nodes, counts))


def _show(record: PlanRecord, *, as_json: bool) -> None:
    typer.echo(msgspec.json.encode(record).decode() if as_json else explain(record))


def _new_id() -> str:
    return f"plan-{secrets.token_hex(3)}"


def _home() -> Path:
    return Path(os.environ.get("DILASERVE_HOME") or ".dilaserve")
