"""The planner of a run as `dilaserve simulate` is told of it. Apart from the other options, since
the optimisation is slow to import."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dilaserve.errors import DiLaServeError
from dilaserve.profiles import ProfileSet
from dilaserve_bench.twin.cluster import ClusterSpec
from dilaserve_bench.twin.options import SimulateOptions
from dilaserve_bench.twin.replanning import Replanner, ReplanSpec
from dilaserve_bench.twin.simulation import Replan
from dilaserve_bench.twin.starting import parse_start_up
from dilaserve_reconfigurator.decision import Costs
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import PlannerOptions
from dilaserve_reconfigurator.whatif import parse_nodes

__all__ = ["make_replan"]

USUAL_NODE = 4
BUDGET_S = 3600.0
"""For a plan: never reached, so that no run depends on the machine."""


def make_replan(
    options: SimulateOptions, spec: ClusterSpec, profiles: ProfileSet, steps: Path
) -> Replan:
    """Raises DiLaServeError for what cannot be planned."""
    if options.source == "model":
        raise DiLaServeError("--replan needs recorded steps; leave out --source model")
    nodes = _nodes(options.nodes, spec.n_gpus)
    start_up = parse_start_up(options.start_up)
    planner = PlannerOptions(
        profiles=profiles,
        paces=load_paces(steps),
        degrees=tuple(sorted({each.tp_degree for each in profiles.profiles})),
        block_length=spec.block_length,
        cache_mode=spec.cache_mode,
        max_batch_tokens=spec.max_batch_tokens,
        overhead=spec.overhead,
        budget_s=BUDGET_S,
        costs=Costs(launch_s=start_up.seconds, min_gain=options.min_gain),
    )
    return partial(
        Replanner,
        ReplanSpec(
            planner=planner,
            nodes=nodes,
            every_s=options.replan_every_s,
            window_s=options.replan_every_s,
            start_up=start_up,
            slo_s=options.slo_s,
        ),
    )


def _nodes(text: str, n_gpus: int) -> tuple[int, ...]:
    if not text:
        whole = n_gpus % USUAL_NODE == 0
        return (USUAL_NODE,) * (n_gpus // USUAL_NODE) if whole else (n_gpus,)
    nodes = parse_nodes(text)
    if sum(nodes) < n_gpus:
        raise DiLaServeError(f"--nodes {text} have {sum(nodes)} GPUs, --instances take {n_gpus}")
    return nodes
