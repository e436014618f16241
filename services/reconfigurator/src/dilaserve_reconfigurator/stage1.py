"""Stage 1: how many instances of each TP degree, as a mixed-integer program (paper, 3.3 and 3.4).

The notation is that of the paper's Table 1. Knows no clock, no solver and no running instance.

    K  request classes       s[k,c]       recompute steps of a request at threshold c
    C  thresholds            s_cache[k,c] its cache steps
    D  TP degrees            y[k,d,b]     its recompute steps on degree d in batches of b: s[k,d]·z
    b  tokens in a pass      y_cache      its cache steps there: s'[k,d]·z'
    L  seconds of a pass     z, z_cache   the one batch size that a degree runs, by kind of step
                             x[d]         instances of a degree
                             slack[k]     SLO less the time of all steps
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyomo.environ as pyo

from dilaserve_reconfigurator.snapshot import DegreeSpeed, RequestClass, Snapshot

__all__ = ["CapacityPlan", "build_model", "load_on", "read_plan", "unreachable"]


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a solved model says."""

    counts: dict[int, int]
    """Instances by TP degree: the fewest that carry the load."""
    loads: dict[int, float]
    """Instances' worth of work, by degree, at the planned rates."""
    mean_threshold: float
    """Over requests, each the mean over its tokens."""
    mean_slack: float
    """Over requests, as a share of their SLO."""
    latencies: list[float]
    """Seconds of all steps of a request, by class."""
    batch_sizes: dict[int, tuple[int, int]]
    """Tokens of a recompute and of a cache pass, by degree that has work."""


def build_model(
    snapshot: Snapshot,
    *,
    counts: Mapping[int, int] | None = None,
    unreachable: frozenset[int] = frozenset(),
) -> pyo.ConcreteModel:
    """The program for a snapshot; with `counts` for those instances instead of the best. Classes
    named in `unreachable` are served, whatever their SLO."""
    model = pyo.ConcreteModel("stage 1")
    _add_sets(model, snapshot)
    _add_variables(model, snapshot, unreachable)
    model.completeness = pyo.Constraint(model.K, rule=_completeness)
    model.recompute_consistency = pyo.Constraint(model.K, rule=_recompute_consistency)
    if snapshot.cache_mode != "none":
        model.recompute_count = pyo.Constraint(model.K, rule=_recompute_count)
        model.cache_consistency = pyo.Constraint(model.K, rule=_cache_consistency)
        model.cache_locality_least = pyo.Constraint(model.K, model.D, rule=_cache_locality_least)
        model.cache_locality_most = pyo.Constraint(model.K, model.D, rule=_cache_locality_most)
        model.one_cache_size = pyo.Constraint(model.D, rule=_one_cache_size)
        model.cache_size_chosen = pyo.Constraint(model.K, model.DB_cache, rule=_cache_size_chosen)
    model.slo = pyo.Constraint(model.K, rule=_slo)
    model.one_size = pyo.Constraint(model.D, rule=_one_size)
    model.size_chosen = pyo.Constraint(model.K, model.DB, rule=_size_chosen)
    model.stability = pyo.Constraint(model.D, rule=_stability)
    if counts is None:
        model.gpus = pyo.Constraint(model.D, rule=_gpus)
    else:
        for degree in model.D:
            model.x[degree].fix(counts.get(degree, 0))
    model.mean_threshold = pyo.Objective(rule=_mean_threshold, sense=pyo.maximize)
    model.slo_share = pyo.Objective(rule=_slo_share, sense=pyo.minimize)
    return model


def read_plan(model: pyo.ConcreteModel) -> CapacityPlan:
    """The solution that a solver left in the model."""
    snapshot: Snapshot = model.snapshot
    loads = {d: float(pyo.value(load_on(model, d))) for d in model.D}
    return CapacityPlan(
        counts={d: round(model.x[d].value) for d in model.D},
        loads=loads,
        mean_threshold=float(pyo.value(model.mean_threshold)),
        mean_slack=1.0 - float(pyo.value(model.slo_share)),
        latencies=[
            each.slo_s - float(model.slack[k].value) for k, each in enumerate(snapshot.classes)
        ],
        batch_sizes={
            d: (_chosen(model.z, d), _chosen(model.z_cache, d)) for d in model.D if loads[d] > 1e-9
        },
    )


def unreachable(snapshot: Snapshot, degrees: frozenset[int] | None = None) -> frozenset[int]:
    """Classes whose SLO no mix (of these degrees; None: of any) can meet, not even for a request
    alone at the fastest threshold. They must not make the program infeasible for the others."""
    speeds = [s for s in snapshot.speeds if degrees is None or s.tp_degree in degrees]
    return frozenset(
        k
        for k, each in enumerate(snapshot.classes)
        if min(_shortest_s(snapshot, each, speed) for speed in speeds) > each.slo_s
    )


def load_on(model: Any, degree: int) -> Any:
    """Instances' worth of work on a degree."""
    speed: DegreeSpeed = model.speed[degree]
    terms = []
    for k, each in enumerate(model.snapshot.classes):
        n_cache = model.snapshot.n_cache_row(each)
        for size in speed.recompute_sizes:
            seconds = _row_s(speed.recompute_s(size, each.n_full), size, each.n_full)
            terms.append(model.rate[k] * seconds * model.y[k, degree, size])
        for size in speed.cache_sizes if len(model.DB_cache) else ():
            seconds = _row_s(speed.cache_s(size, n_cache), size, n_cache)
            terms.append(model.rate[k] * seconds * model.y_cache[k, degree, size])
    return sum(terms)


# --- what the program is about -------------------------------------------------------------------


def _add_sets(model: pyo.ConcreteModel, snapshot: Snapshot) -> None:
    model.snapshot = snapshot
    model.speed = {speed.tp_degree: speed for speed in snapshot.speeds}
    model.K = pyo.RangeSet(0, len(snapshot.classes) - 1)
    model.C = pyo.RangeSet(0, len(snapshot.paces) - 1)
    model.D = pyo.Set(initialize=snapshot.degrees)
    sizes = [(s.tp_degree, b) for s in snapshot.speeds for b in s.recompute_sizes]
    cache_sizes = [(s.tp_degree, b) for s in snapshot.speeds for b in s.cache_sizes]
    model.DB = pyo.Set(dimen=2, initialize=sizes)
    model.DB_cache = pyo.Set(
        dimen=2, initialize=cache_sizes if snapshot.cache_mode != "none" else []
    )
    model.rate = [snapshot.rate_factor * each.rate for each in snapshot.classes]
    model.T = [snapshot.tokens_per_step(each) for each in snapshot.classes]


def _add_variables(
    model: pyo.ConcreteModel, snapshot: Snapshot, unreachable: frozenset[int]
) -> None:
    def slack_bounds(_: Any, k: int) -> tuple[float | None, float]:
        return (None if k in unreachable else 0.0), snapshot.classes[k].slo_s

    def most(model: Any, k: int, *_: int) -> tuple[float, float]:
        return 0.0, _most_steps(model, k)

    def most_cache(model: Any, k: int, *_: int) -> tuple[float, float]:
        return 0.0, _most_cache_steps(model, k)

    has_cache = snapshot.cache_mode != "none"
    model.s = pyo.Var(model.K, model.C, bounds=most)
    model.s_cache = pyo.Var(model.K, model.C if has_cache else [], bounds=most_cache)
    model.y = pyo.Var(model.K, model.DB, bounds=most)
    model.y_cache = pyo.Var(model.K, model.DB_cache, bounds=most_cache)
    model.z = pyo.Var(model.DB, within=pyo.Binary)
    model.z_cache = pyo.Var(model.DB_cache, within=pyo.Binary)
    model.x = pyo.Var(
        model.D, within=pyo.NonNegativeIntegers, bounds=lambda _, d: (0, snapshot.slots(d))
    )
    model.slack = pyo.Var(model.K, bounds=slack_bounds)


# --- constraints: one rule each ------------------------------------------------------------------


def _completeness(model: Any, k: int) -> Any:
    """The steps at all thresholds unmask all output tokens: Σ_c T_c (s + s') = O."""
    return sum(model.T[k][c] * _steps_at(model, k, c) for c in model.C) == _of(model, k).n_output


def _recompute_count(model: Any, k: int) -> Any:
    """A request recomputes once for each of its blocks; all other steps are cache steps."""
    n_blocks = model.snapshot.recompute_steps(_of(model, k))
    return sum(model.s[k, c] for c in model.C) == n_blocks


def _recompute_consistency(model: Any, k: int) -> Any:
    """As many recompute steps at all thresholds as on all degrees: Σ_c s = Σ_d s."""
    return sum(model.s[k, c] for c in model.C) == sum(model.y[k, d, b] for d, b in model.DB)


def _cache_consistency(model: Any, k: int) -> Any:
    """The same for cache steps: Σ_c s' = Σ_d s'."""
    on_degrees = sum(model.y_cache[k, d, b] for d, b in model.DB_cache)
    return sum(model.s_cache[k, c] for c in model.C) == on_degrees


def _cache_locality_least(model: Any, k: int, degree: int) -> Any:
    """Cache steps run where their block was recomputed: no fewer than its fastest threshold
    takes."""
    least, _ = _cache_steps_per_block(model, k)
    return _cache_steps_on(model, k, degree) >= least * _recompute_steps_on(model, k, degree)


def _cache_locality_most(model: Any, k: int, degree: int) -> Any:
    """And no more than its slowest threshold takes."""
    _, most = _cache_steps_per_block(model, k)
    return _cache_steps_on(model, k, degree) <= most * _recompute_steps_on(model, k, degree)


def _slo(model: Any, k: int) -> Any:
    """All steps of a request within its SLO: Σ_d Σ_b z L s + z' L s' + slack = SLO."""
    each = _of(model, k)
    n_cache = model.snapshot.n_cache_row(each)
    recompute = sum(
        model.speed[d].recompute_s(b, each.n_full) * model.y[k, d, b] for d, b in model.DB
    )
    cache = sum(
        model.speed[d].cache_wait_s(b, n_cache) * model.y_cache[k, d, b] for d, b in model.DB_cache
    )
    return recompute + cache + model.slack[k] == each.slo_s


def _one_size(model: Any, degree: int) -> Any:
    """All instances of a degree run recompute passes of one size: Σ_b z = 1."""
    return sum(model.z[degree, b] for b in model.speed[degree].recompute_sizes) == 1


def _one_cache_size(model: Any, degree: int) -> Any:
    """And cache passes of one size: Σ_b z' = 1."""
    return sum(model.z_cache[degree, b] for b in model.speed[degree].cache_sizes) == 1


def _size_chosen(model: Any, k: int, degree: int, size: int) -> Any:
    """y = s·z, exactly: 0 for all sizes but the chosen one, whose y is then s[k,d]."""
    return model.y[k, degree, size] <= _most_steps(model, k) * model.z[degree, size]


def _cache_size_chosen(model: Any, k: int, degree: int, size: int) -> Any:
    """y' = s'·z', exactly."""
    most = _most_cache_steps(model, k)
    return model.y_cache[k, degree, size] <= most * model.z_cache[degree, size]


def _stability(model: Any, degree: int) -> Any:
    """The work that arrives a second fits into the instances:
    Σ_k RPS [s (P+O) α + s' B β] ≤ x, with α = Σ_b z L/b and β = Σ_b z' L/b."""
    return load_on(model, degree) <= model.x[degree]


def _gpus(model: Any, degree: int) -> Any:
    """Instances of this degree and above fit on the nodes. Degrees divide one another, so they do
    exactly if, for every degree, the rooms of that degree suffice: no node needs a variable of its
    own, and equal nodes cannot be told apart."""
    taken = sum(d // degree * model.x[d] for d in model.D if d >= degree)
    return taken <= model.snapshot.slots(degree)


# --- objectives, the first one first -------------------------------------------------------------


def _mean_threshold(model: Any) -> Any:
    """Threshold of the mean token of the mean request."""
    paces = model.snapshot.paces
    return sum(
        each.rate
        / (model.snapshot.total_rate * each.n_output)
        * sum(paces[c].threshold * model.T[k][c] * _steps_at(model, k, c) for c in model.C)
        for k, each in enumerate(model.snapshot.classes)
    )


def _slo_share(model: Any) -> Any:
    """Share of its SLO that the mean request takes: 1 less the mean slack."""
    return sum(
        each.rate / model.snapshot.total_rate * (each.slo_s - model.slack[k]) / each.slo_s
        for k, each in enumerate(model.snapshot.classes)
    )


def _shortest_s(snapshot: Snapshot, each: RequestClass, speed: DegreeSpeed) -> float:
    n_steps, _ = snapshot.step_bounds(each)
    recompute_s = min(speed.recompute_s(b, each.n_full) for b in speed.recompute_sizes)
    if snapshot.cache_mode == "none":
        return n_steps * recompute_s
    n_blocks = snapshot.recompute_steps(each)
    cache_s = min(speed.cache_s(b, snapshot.n_cache_row(each)) for b in speed.cache_sizes)
    return n_blocks * recompute_s + (n_steps - n_blocks) * cache_s


# --- terms ---------------------------------------------------------------------------------------


def _row_s(pass_s: float, size: int, n_row: int) -> float:
    """A row's part of a pass, by tokens."""
    return pass_s * n_row / max(size, n_row)


def _of(model: Any, k: int) -> RequestClass:
    each: RequestClass = model.snapshot.classes[k]
    return each


def _steps_at(model: Any, k: int, c: int) -> Any:
    return model.s[k, c] + (model.s_cache[k, c] if len(model.DB_cache) else 0.0)


def _recompute_steps_on(model: Any, k: int, degree: int) -> Any:
    return sum(model.y[k, degree, b] for b in model.speed[degree].recompute_sizes)


def _cache_steps_on(model: Any, k: int, degree: int) -> Any:
    return sum(model.y_cache[k, degree, b] for b in model.speed[degree].cache_sizes)


def _cache_steps_per_block(model: Any, k: int) -> tuple[float, float]:
    n_blocks = model.snapshot.recompute_steps(_of(model, k))
    least, most = model.snapshot.step_bounds(_of(model, k))
    return least / n_blocks - 1.0, most / n_blocks - 1.0


def _most_steps(model: Any, k: int) -> float:
    """Recompute steps of a request at most: without a cache, all that the slowest threshold
    takes."""
    snapshot: Snapshot = model.snapshot
    if snapshot.cache_mode == "none":
        return snapshot.step_bounds(_of(model, k))[1]
    return float(snapshot.recompute_steps(_of(model, k)))


def _most_cache_steps(model: Any, k: int) -> float:
    snapshot: Snapshot = model.snapshot
    return snapshot.step_bounds(_of(model, k))[1] - snapshot.recompute_steps(_of(model, k))


def _chosen(z: Any, degree: int) -> int:
    """The size whose binary is set; 0 where there is none to choose."""
    return next((b for d, b in z.index_set() if d == degree and z[d, b].value > 0.5), 0)
