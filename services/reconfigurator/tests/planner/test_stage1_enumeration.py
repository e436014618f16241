"""Stage 1 against all that there is to choose from: every layout of every node, and every batch
size. What is left then is a linear program in the paper's own terms (α, β, L are numbers)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve_reconfigurator import stage1
from dilaserve_reconfigurator.snapshot import DegreeSpeed, RequestClass, Snapshot
from dilaserve_reconfigurator.solving import solve

from .builders import EXACT, request_class, snapshot, speed

Sizes = dict[int, tuple[int, int]]
"""By degree, the batch sizes of recompute and cache passes."""

classes = st.builds(
    request_class,
    st.sampled_from([32, 96]),
    st.sampled_from([32, 48, 64]),
    slo_s=st.sampled_from([0.5, 0.8, 1.5, 4.0]),
    rate=st.sampled_from([0.2, 0.7, 1.5]),
)


@st.composite
def speeds(draw: st.DrawFn) -> list[DegreeSpeed]:
    """TP-1 and TP-2, the latter 1.1 to 2.5 times as fast; larger batches cost less a token."""
    pass_s = draw(st.sampled_from([0.02, 0.05]))
    slope = draw(st.sampled_from([1.1, 1.6]))
    gain = draw(st.sampled_from([1.1, 1.7, 2.5]))
    others = draw(st.sampled_from([(), ((0.2, 96),)]))
    return [
        replace(speed(d, {64: s, 160: s * slope}, {32: s / 2, 96: s / 2 * slope}), others=others)
        for d, s in ((1, pass_s), (2, pass_s / gain))
    ]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    given_classes=st.lists(classes, min_size=1, max_size=2),
    given_speeds=speeds(),
    nodes=st.sampled_from([(2,), (3,), (2, 1), (1, 1)]),
)
def test_no_choice_is_better(
    given_classes: list[RequestClass], given_speeds: list[DegreeSpeed], nodes: tuple[int, ...]
) -> None:
    problem = snapshot(given_classes, given_speeds, nodes=nodes)
    model = stage1.build_model(problem)
    outcome = solve(model, 30.0, gap=EXACT)
    values = [found for choice in choices(problem) if (found := best(problem, *choice))]
    if not values:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "solved"
    plan = stage1.read_plan(model)
    threshold = max(value for value, _ in values)
    share = min(share for value, share in values if value > threshold - 1e-5)
    assert plan.mean_threshold == pytest.approx(threshold, abs=1e-4)
    assert 1.0 - plan.mean_slack == pytest.approx(share, abs=1e-3)


def choices(problem: Snapshot) -> Iterator[tuple[dict[int, int], Sizes]]:
    """Every mix that no other contains, with every choice of sizes."""
    mixes = {tuple(map(sum, zip(*layout, strict=True))) for layout in layouts(problem.nodes)}
    maximal = [a for a in mixes if not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in mixes)]
    sizes = [list(product(s.recompute_sizes, s.cache_sizes)) for s in problem.speeds]
    for (ones, twos), (of_one, of_two) in product(maximal, product(*sizes)):
        yield {1: ones, 2: twos}, {1: of_one, 2: of_two}


def layouts(nodes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """(TP-1, TP-2) instances on each node."""
    yield from product(*([(n - 2 * twos, twos) for twos in range(n // 2 + 1)] for n in nodes))


def best(problem: Snapshot, counts: dict[int, int], sizes: Sizes) -> tuple[float, float] | None:
    """The highest mean threshold of one choice, and the least share of the SLOs at it."""
    solver, threshold, share = linear_program(problem, counts, sizes)
    solver.maximize(threshold)
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    highest = solver.getObjectiveValue()
    solver.addConstr(threshold >= highest - 1e-7)
    solver.minimize(share)
    return highest, solver.getObjectiveValue()


def linear_program(  # type: ignore[no-untyped-def]
    problem: Snapshot, counts: dict[int, int], sizes: Sizes
):
    solver = highspy.Highs()
    solver.silent()
    paces = problem.paces
    total = sum(each.rate for each in problem.classes)
    work = dict.fromkeys(counts, 0.0)
    threshold, share = 0.0, 0.0
    for each in problem.classes:
        n_blocks = -(-each.n_output // 32)
        at = [solver.addVariable(lb=0) for _ in paces]  # steps of either kind, by threshold
        steps = {d: (solver.addVariable(lb=0), solver.addVariable(lb=0)) for d in counts}
        solver.addConstr(
            sum(p.tokens_per_step * s for p, s in zip(paces, at, strict=True)) == each.n_output
        )
        solver.addConstr(sum(s for s, _ in steps.values()) == n_blocks)
        solver.addConstr(sum(s + c for s, c in steps.values()) == sum(at))
        time_s = 0.0
        for speed_of in problem.speeds:
            d, (b, b_cache) = speed_of.tp_degree, sizes[speed_of.tp_degree]
            s, c = steps[d]
            n_row = each.n_prompt + each.n_output
            pass_s, cache_s = speed_of.recompute_s(b, n_row), speed_of.cache_s(b_cache, 32)
            time_s += pass_s * s + speed_of.cache_wait_s(b_cache, 32) * c
            alpha, beta = pass_s / max(b, n_row), cache_s / b_cache
            work[d] += each.rate * (n_row * alpha * s + 32 * beta * c)
            solver.addConstr(c >= (each.n_output / n_blocks / 8 - 1) * s)
            solver.addConstr(c <= (each.n_output / n_blocks / 4 - 1) * s)
        solver.addConstr(time_s <= each.slo_s)
        share += each.rate / total / each.slo_s * time_s
        threshold += sum(
            each.rate / total / each.n_output * p.threshold * p.tokens_per_step * s
            for p, s in zip(paces, at, strict=True)
        )
    for d, n in counts.items():
        solver.addConstr(work[d] <= n)
    return solver, threshold, share
