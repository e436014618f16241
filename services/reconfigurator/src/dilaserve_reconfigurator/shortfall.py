"""What a mix lacks that cannot serve a load within its SLOs: more instances, or faster ones.

Knows no clock, no solver and no running instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyomo.environ as pyo

from dilaserve_reconfigurator import stage1
from dilaserve_reconfigurator.record import mix_text
from dilaserve_reconfigurator.snapshot import Snapshot

__all__ = ["build_model", "lacking", "too_late"]

LEAST = 0.05
"""Of an instance, below which a number of them reads as none."""


def build_model(
    snapshot: Snapshot, counts: Mapping[int, int], unreachable: frozenset[int]
) -> pyo.ConcreteModel:
    """Stage 1 for these instances, where each degree that they have may have more: as few GPUs'
    worth of them as the load needs within its SLOs. Infeasible where no number of them does."""
    model = stage1.build_model(snapshot, counts=counts, unreachable=unreachable)
    model.lack = pyo.Var(model.D, within=pyo.NonNegativeReals)
    for degree in model.D:
        if not counts.get(degree, 0):
            model.lack[degree].fix(0.0)
    model.del_component(model.stability)
    model.stability_with_more = pyo.Constraint(model.D, rule=_stability_with_more)
    model.del_component(model.mean_threshold)
    model.del_component(model.slo_share)
    model.lacking_gpus = pyo.Objective(rule=_lacking_gpus, sense=pyo.minimize)
    return model


def lacking(model: pyo.ConcreteModel) -> str:
    """In words, from the solution that a solver left in the model."""
    snapshot: Snapshot = model.snapshot
    parts = [
        f"{lack:.1f} instances of TP-{d} (work for {model.x[d].value + lack:.1f}, "
        f"{round(model.x[d].value)} there)"
        for d in model.D
        if (lack := float(model.lack[d].value)) >= LEAST
    ]
    return (
        f"it lacks {' and '.join(parts) or 'less than a tenth of an instance'}, even at the lowest "
        f"thresholds, for {snapshot.rate_factor:g} times the rates; add GPUs, or allow longer SLOs"
    )


def too_late(snapshot: Snapshot, counts: Mapping[int, int], unreachable: frozenset[int]) -> str:
    """In words, where no number of its instances would do."""
    degrees = frozenset(degree for degree, n in counts.items() if n)
    late = sorted(stage1.unreachable(snapshot, degrees) - unreachable)
    of_mix = mix_text(dict.fromkeys(degrees, 1)).replace("1×", "")
    names = ", ".join(
        f"{each.n_prompt} + {each.n_output} tokens within {each.slo_s:g} s"
        for each in (snapshot.classes[k] for k in late)
    )
    if names:
        return f"{of_mix} is too slow for {names}, however many there are; allow a longer SLO"
    return (
        f"however many instances of {of_mix} there are, no size of their batches meets all SLOs; "
        "allow longer ones"
    )


def _stability_with_more(model: Any, degree: int) -> Any:
    return stage1.load_on(model, degree) <= model.x[degree] + model.lack[degree]


def _lacking_gpus(model: Any) -> Any:
    return sum(degree * model.lack[degree] for degree in model.D)
