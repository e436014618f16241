"""Each constraint of Stage 1 on an instance that can be checked by hand.

Unless said otherwise a request has 32 + 32 tokens, so one block: one recompute step, and 7 cache
steps at threshold 0.9 or 3 at 0.5.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pyomo.environ as pyo
import pytest

from dilaserve_reconfigurator import stage1
from dilaserve_reconfigurator.snapshot import PlanningError
from dilaserve_reconfigurator.solving import solve

from .builders import EXACT, outcome_of, request_class, snapshot, solved, speed

near = partial(pytest.approx, rel=1e-4, abs=1e-4)
"""What a later objective may take from an earlier one is well below."""
FLAT = speed(1, {64: 0.1})
"""Every pass takes 0.1 s."""


def total(model: pyo.ConcreteModel, variable: str, k: int = 0) -> float:
    return sum(v.value for index, v in getattr(model, variable).items() if index[0] == k)


def test_completeness_takes_as_many_steps_as_tokens_need() -> None:
    model, plan = solved(snapshot([request_class()], [FLAT]))
    assert total(model, "s") + total(model, "s_cache") == near(8.0)
    assert plan.mean_threshold == near(0.9)
    assert plan.latencies == [near(0.8)]


@pytest.mark.parametrize(("n_output", "n_blocks"), [(32, 1), (48, 2), (96, 3)])
def test_recompute_count_is_one_a_block(n_output: int, n_blocks: int) -> None:
    model, _ = solved(snapshot([request_class(n_output=n_output)], [FLAT]))
    assert total(model, "s") == near(n_blocks)
    assert total(model, "s_cache") == near(n_output / 4 - n_blocks)


def test_consistency_runs_every_step_on_some_degree() -> None:
    model, _ = solved(snapshot([request_class()], [FLAT, speed(2, {64: 0.05})], nodes=(4,)))
    assert total(model, "y") == near(total(model, "s"))
    assert total(model, "y_cache") == near(total(model, "s_cache"))


def test_slo_lowers_the_threshold() -> None:
    """0.6 s are 6 steps: 16 tokens at 0.9 take 4, 16 at 0.5 take 2."""
    _, plan = solved(snapshot([request_class(slo_s=0.6)], [FLAT]))
    assert plan.mean_threshold == near(0.7)
    assert plan.latencies == [near(0.6)]
    assert plan.mean_slack == near(0.0)


def test_slo_below_the_lowest_threshold_is_infeasible() -> None:
    assert outcome_of(snapshot([request_class(slo_s=0.39)], [FLAT])).status == "infeasible"


def test_unreachable_class_is_served_without_its_slo() -> None:
    given = snapshot([request_class(slo_s=0.39), request_class()], [FLAT])
    model = stage1.build_model(given, unreachable=frozenset({0}))
    assert solve(model, 30.0, gap=EXACT).status == "solved"
    assert stage1.read_plan(model).latencies[0] >= 0.4 - 1e-6


def test_every_class_has_its_own_slo() -> None:
    """One as in the test above at 0.7, one without hurry at 0.9, three times as frequent."""
    tight, loose = request_class(slo_s=0.6), request_class(rate=0.03)
    model, plan = solved(snapshot([tight, loose], [FLAT], nodes=(4,)))
    assert plan.mean_threshold == near(0.25 * 0.7 + 0.75 * 0.9)
    assert model.slack[1].value == near(100.0 - 0.8)


def test_degree_runs_one_batch_size() -> None:
    """Without a cache, in passes of 64 tokens (0.1 s) or 128 (0.15 s), 1.5 requests a second
    within 1 s each: both sizes allow 6 2/3 steps, one by capacity, the other by the SLO. Could a
    request mix them, it would have 7.6."""
    given = snapshot(
        [request_class(slo_s=1.0, rate=1.5)],
        [speed(1, {64: 0.1, 128: 0.15})],
        cache_mode="none",
    )
    model, plan = solved(given)
    assert sum(z.value for z in model.z.values()) == near(1.0)
    assert total(model, "s") == near(20 / 3)
    assert plan.mean_threshold == near(0.5 + 0.4 * 2 / 3)
    assert plan.batch_sizes == {1: (64, 0)}, "the one with slack"


def test_steps_run_in_batches_of_the_chosen_size_only() -> None:
    given = snapshot([request_class(), request_class(n_output=64)], [speed(1, {64: 1, 128: 1.5})])
    model, plan = solved(given)
    size = plan.batch_sizes[1][0]
    assert all(y.value < 1e-6 for (_, _, b), y in model.y.items() if b != size)


def test_longer_row_is_a_pass_of_its_own() -> None:
    """96 tokens in batches of 64: a pass of 96 takes 0.3 s, and an instance for all of it."""
    given = snapshot(
        [request_class(n_prompt=64, rate=1.0)],
        [speed(1, {64: 0.1, 128: 0.5})],
        cache_mode="none",
        nodes=(3,),
    )
    small = given.speeds[0]
    assert small.recompute_s(64, 96) == near(0.3)
    _, plan = solved(given)
    assert plan.batch_sizes == {1: (64, 0)}
    assert plan.latencies == [near(8 * 0.3)]
    assert plan.loads[1] == near(8 * 0.3)


def test_stability_bounds_the_work_of_a_degree() -> None:
    """A request costs 0.1 s for each of its steps, since a batch is one row: at 1.25 a second an
    instance can do 8 steps each for one GPU, at 2 a second only 5."""
    full = snapshot([request_class(rate=1.25)], [FLAT])
    assert solved(full)[1].mean_threshold == near(0.9)
    assert solved(full)[1].loads == {1: near(1.0)}
    above = snapshot([request_class(rate=2.0)], [FLAT])
    assert solved(above)[1].mean_threshold == near(0.5 + 0.4 * 1 / 4)
    assert outcome_of(snapshot([request_class(rate=2.6)], [FLAT])).status == "infeasible"


def test_stability_prices_rows_by_their_share_of_the_batch() -> None:
    """Recompute passes of 256 tokens are 4 rows in 0.4 s; cache passes of 64 are 2 in 0.1 s."""
    given = snapshot([request_class(rate=1.0)], [speed(1, {256: 0.4}, {64: 0.1})])
    assert solved(given)[1].loads[1] == near(0.4 / 4 + 7 * 0.1 / 2)


def test_rate_is_planned_with_its_safety_factor() -> None:
    given = snapshot([request_class(rate=1.0)], [FLAT], nodes=(2,), rate_factor=2.0)
    assert solved(given)[1].loads[1] == near(1.6)


def test_work_that_fits_nowhere_alone_is_spread_over_degrees() -> None:
    """One node of three GPUs: TP-2 and TP-1. A request costs 0.4 s there and 0.8 s here."""
    given = snapshot(
        [request_class(rate=3.0)],
        [FLAT, speed(2, {64: 0.05}, {32: 0.05})],
        nodes=(3,),
    )
    _, plan = solved(given)
    assert plan.counts == {1: 1, 2: 1}
    assert plan.loads == {1: near(0.4), 2: near(1.0)}


@pytest.mark.parametrize(
    ("nodes", "rate", "expected"),
    [((1, 1), 9.0, {1: 2, 2: 0}), ((3,), 28.0, {1: 1, 2: 1}), ((2, 2), 45.0, {1: 0, 2: 2})],
)
def test_instances_fit_on_single_nodes(
    nodes: tuple[int, ...], rate: float, expected: dict[int, int]
) -> None:
    """TP-1 serves 5 requests a second and TP-2 25, but two nodes of one GPU have no room for it,
    and one node of three GPUs has room for one."""
    given = snapshot(
        [request_class(rate=rate)],
        [speed(1, {64: 0.025}, {32: 0.025}), speed(2, {64: 0.005}, {32: 0.005})],
        nodes=nodes,
    )
    assert solved(given)[1].counts == expected


def test_cache_steps_run_where_their_block_was_recomputed() -> None:
    """TP-2 is fast at recompute steps and slow at cache steps, TP-1 the other way round. All on
    TP-1 takes 1 + 7 × 0.01 s; to take each step where it is fast would be 0.08 s."""
    given = snapshot(
        [request_class()],
        [speed(1, {64: 1.0}, {32: 0.01}), speed(2, {64: 0.01}, {32: 1.0})],
        nodes=(3,),
    )
    model, plan = solved(given)
    assert plan.latencies == [near(1.07)]
    for degree in (1, 2):
        recomputed = model.y[0, degree, 64].value
        assert 3 * recomputed - 1e-6 <= model.y_cache[0, degree, 32].value <= 7 * recomputed + 1e-6


def test_cache_step_waits_for_others_that_recompute() -> None:
    """Passes of three cache rows take 0.1 s, and each of the two others recomputes 64 tokens in a
    tenth of the passes, which then take 0.5 s: 0.1 + 2 × 0.1 × 0.4 s. Work is what it was."""
    alone = speed(1, {128: 0.5}, {96: 0.1})
    mixed = replace(alone, others=((0.1, 64),))
    assert mixed.cache_wait_s(96, 32) == near(0.18)
    apart, together = (solved(snapshot([request_class()], [s]))[1] for s in (alone, mixed))
    assert together.latencies[0] - apart.latencies[0] == near(7 * 0.08)
    assert together.loads == {1: near(apart.loads[1])}


def test_threshold_comes_before_slack() -> None:
    """A lower threshold would halve the latency; it is not even looked at."""
    _, plan = solved(snapshot([request_class()], [FLAT, speed(2, {64: 0.09})], nodes=(2,)))
    assert plan.mean_threshold == near(0.9)


def test_slack_decides_among_equal_thresholds() -> None:
    _, plan = solved(
        snapshot([request_class()], [FLAT, speed(2, {64: 0.05}, {32: 0.05})], nodes=(2,))
    )
    assert plan.counts == {1: 0, 2: 1}
    assert plan.latencies == [near(0.4)]


def test_given_counts_are_evaluated_as_they_are() -> None:
    given = snapshot([request_class()], [FLAT, speed(2, {64: 0.05}, {32: 0.05})], nodes=(2,))
    _, plan = solved(given, counts={1: 2, 2: 0})
    assert plan.counts == {1: 2, 2: 0}
    assert plan.latencies == [near(0.8)]


def test_without_a_cache_all_steps_recompute() -> None:
    model, plan = solved(snapshot([request_class()], [FLAT], cache_mode="none"))
    assert total(model, "s") == near(8.0)
    assert plan.batch_sizes == {1: (64, 0)}


def test_prefix_cache_computes_what_is_left_of_the_sequence() -> None:
    """Two blocks: cache steps of the first compute 64 tokens, of the second 32; 48 on average."""
    given = snapshot(
        [request_class(n_output=64, rate=1.0)],
        [speed(1, {128: 0.1}, {48: 0.1})],
        cache_mode="prefix",
        nodes=(2,),
    )
    assert solved(given)[1].loads[1] == near(2 * 0.1 * 96 / 128 + 14 * 0.1)


def test_step_unmasks_no_more_than_its_block() -> None:
    """2 tokens take one step, though a step unmasks 4 where there are as many."""
    model, plan = solved(snapshot([request_class(n_output=2)], [FLAT]))
    assert total(model, "s") + total(model, "s_cache") == near(1.0)
    assert plan.mean_threshold == near(0.9)


def test_degrees_that_do_not_divide_one_another_are_refused() -> None:
    with pytest.raises(PlanningError, match=r"TP degrees \(2, 3\) do not divide one another"):
        snapshot([request_class()], [speed(2, {64: 1}), speed(3, {64: 1})], nodes=(8,))


def test_cluster_without_room_is_refused() -> None:
    with pytest.raises(PlanningError, match=r"no node of \[1\] GPUs has room"):
        snapshot([request_class()], [speed(2, {64: 1})], nodes=(1,))
