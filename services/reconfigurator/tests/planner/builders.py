"""Small planning problems with numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyomo.environ as pyo

from dilaserve.messages import CacheMode
from dilaserve.profiles import LatencyCurve
from dilaserve_reconfigurator import stage1
from dilaserve_reconfigurator.snapshot import DegreeSpeed, Pace, RequestClass, Snapshot
from dilaserve_reconfigurator.solving import Outcome, solve
from dilaserve_reconfigurator.stage1 import CapacityPlan

EXACT = 1e-7
PACES = (Pace(threshold=0.9, tokens_per_step=4.0), Pace(threshold=0.5, tokens_per_step=8.0))
"""32 tokens take 8 steps at 0.9 and 4 at 0.5."""


def request_class(
    n_prompt: int = 32, n_output: int = 32, *, slo_s: float = 100.0, rate: float = 0.01
) -> RequestClass:
    return RequestClass(n_prompt=n_prompt, n_output=n_output, slo_s=slo_s, rate=rate)


def speed(
    tp_degree: int, recompute: Mapping[int, float], cache: Mapping[int, float] | None = None
) -> DegreeSpeed:
    """A degree whose instances run batches of these sizes, in so many seconds."""
    cache = cache or {32: 0.1}
    return DegreeSpeed(
        tp_degree=tp_degree,
        recompute=LatencyCurve(recompute.items()),
        cache=LatencyCurve(cache.items()),
        recompute_sizes=tuple(recompute),
        cache_sizes=tuple(cache),
    )


def snapshot(
    classes: Sequence[RequestClass],
    speeds: Sequence[DegreeSpeed],
    *,
    nodes: tuple[int, ...] = (1,),
    cache_mode: CacheMode = "dual",
    rate_factor: float = 1.0,
) -> Snapshot:
    return Snapshot(
        classes=tuple(classes),
        nodes=nodes,
        speeds=tuple(speeds),
        paces=PACES,
        cache_mode=cache_mode,
        rate_factor=rate_factor,
    )


def solved(
    given: Snapshot, *, counts: Mapping[int, int] | None = None, gap: float = EXACT
) -> tuple[pyo.ConcreteModel, CapacityPlan]:
    """The model with its solution, and the plan that it holds."""
    model = stage1.build_model(given, counts=counts)
    outcome = solve(model, 30.0, gap=gap)
    assert outcome.status == "solved", outcome
    return model, stage1.read_plan(model)


def outcome_of(given: Snapshot, **options: object) -> Outcome:
    return solve(stage1.build_model(given, **options), 30.0, gap=EXACT)  # type: ignore[arg-type]
