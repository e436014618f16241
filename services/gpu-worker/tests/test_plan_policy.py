"""Plan policies: what each lets into a pass, that each row has its turn, and that the scheduler's
limit has the last word. Rows are made up; the engines are held to each other in bench's tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.budget import PassBudget
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.plan_policy import (
    LEAST_SHARE,
    BlockServe,
    PlanPolicy,
    PlanPolicyName,
    Sangam,
    Static,
    build_plan_policy,
)
from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.models.model import Model

POLICIES: tuple[PlanPolicyName, ...] = ("blockserve", "sangam", "static")
N_TOKENS = 256
"""Of a pass."""
BLOCK = 16


@dataclass(frozen=True)
class Row:
    request_id: str
    kind: RowKind
    n_tokens: int
    n_keys: int


@dataclass
class Request:
    """Blocks of a recompute row and `n_cache` cache rows each; it begins in the middle of one."""

    name: str
    n_keys: int
    n_blocks: int
    n_cache: int
    last_pass: int = 0
    at: int = 0
    """Rows that it has had, of `n_blocks * (1 + n_cache)`."""

    def row(self) -> Row:
        if self.at % (1 + self.n_cache):
            return Row(self.name, "cache", BLOCK, self.n_keys)
        return Row(self.name, "recompute", self.n_keys, self.n_keys)

    def is_done(self) -> bool:
        return self.at == self.n_blocks * (1 + self.n_cache)


@dataclass
class Passes:
    """Runs made-up requests under a policy until all are done."""

    policy: PlanPolicy
    requests: list[Request]
    n_full: int | None = None
    seen: list[list[Row]] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Row]]:
        while self.requests:
            yield self.run()

    def run(self) -> list[Row]:
        batch = self.policy.batch
        ready = [r for r in self.requests if batch is None or r.name in batch]
        rows = [request.row() for request in sorted(ready, key=lambda r: r.last_pass)]
        chosen = self.policy.choose(rows, PassBudget(N_TOKENS, self.n_full))
        self.seen.append(chosen)
        ran = {row.request_id for row in chosen}
        assert len(ran) == len(chosen)
        for request in [r for r in self.requests if r.name in ran]:
            request.last_pass = len(self.seen)
            request.at += 1
            if request.is_done():
                self.requests.remove(request)
                self.policy.ended(request.name)
        return chosen


def full_tokens(rows: list[Row]) -> int:
    return sum(row.n_tokens for row in rows if row.kind != "cache")


def cache(name: str) -> Row:
    return Row(name, "cache", BLOCK, 100)


def full(name: str, n_tokens: int, kind: RowKind = "recompute") -> Row:
    return Row(name, kind, n_tokens, n_tokens)


def names(rows: list[Row]) -> list[str]:
    return [row.request_id for row in rows]


def budget(n_full: int | None = None) -> PassBudget:
    return PassBudget(N_TOKENS, n_full)


REQUESTS = st.lists(
    st.builds(
        Request,
        name=st.just(""),
        n_keys=st.integers(BLOCK, N_TOKENS),
        n_blocks=st.integers(1, 4),
        n_cache=st.integers(0, 6),
    ),
    min_size=1,
    max_size=10,
).map(
    lambda found: [Request(f"r{n}", r.n_keys, r.n_blocks, r.n_cache) for n, r in enumerate(found)]
)
N_FULL = st.one_of(st.none(), st.integers(0, N_TOKENS))
N_QUANTUM = st.integers(1, 2 * N_TOKENS)


# --- all of them ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(REQUESTS, N_FULL, N_QUANTUM, st.sampled_from(POLICIES))
def test_all_end_within_every_budget(
    requests: list[Request], n_full: int | None, quantum: int, name: PlanPolicyName
) -> None:
    passes = Passes(build_plan_policy(name, n_tokens=quantum), requests, n_full)
    for rows in passes:
        assert rows
        assert sum(row.n_tokens for row in rows) <= N_TOKENS
        long = [row.n_tokens for row in rows if row.kind != "cache"]
        if n_full is not None and len(long) > 1:  # the first of them may exceed it
            assert sum(long) <= max(n_full, long[0])
    assert passes.policy.batch is None


def test_blockserve_mixes_all_that_fit_least_recently_run_first() -> None:
    rows = [full("r0", 150), cache("a"), full("long", 100), full("r1", 60, "rebuild"), cache("b")]
    assert names(BlockServe().choose(rows, budget())) == ["r0", "a", "r1", "b"]
    assert names(BlockServe().choose(rows, budget(100))) == ["r0", "a", "b"]


@pytest.mark.parametrize("name", POLICIES)
def test_the_least_recently_run_always_runs_under(name: PlanPolicyName) -> None:
    policy = build_plan_policy(name)
    rows = [Row("old", "cache", 60, 100), Row("new", "cache", 50, 90)]
    assert names(policy.choose(rows, PassBudget(100, None))) == ["old"]


# --- sangam --------------------------------------------------------------------------------------


def test_a_recompute_waits_until_enough_is_carried_forward() -> None:
    policy = Sangam(80)
    rows = [full("long", 200), cache("a"), cache("b")]
    ran = [names(policy.choose(rows, budget())) for _ in range(8)]
    # each pass earns 80 - 32: 200 are there in the fifth; what is over is carried on
    assert [n for n, each in enumerate(ran) if "long" in each] == [4]
    assert all({"a", "b"} <= set(each) for each in ran)


def test_a_rebuild_waits_like_a_recompute() -> None:
    rows = [full("long", 200, "rebuild"), cache("a")]
    assert names(Sangam(80).choose(rows, budget())) == ["a"]


def test_nobody_passes_the_head_of_the_line() -> None:
    policy = Sangam(100)
    rows = [full("long", 200), full("short", 40), cache("a")]
    assert names(policy.choose(rows, budget())) == ["a"]
    assert names(policy.choose(rows, budget())) == ["a"]
    assert names(policy.choose(rows, budget())) == ["long", "short", "a"]  # 252 earned


def test_where_nothing_is_held_up_the_head_runs_at_once() -> None:
    policy = Sangam(80)
    assert names(policy.choose([full("long", 200), full("other", 30)], budget())) == ["long"]
    assert names(policy.choose([full("other", 30)], budget())) == ["other"]


def test_an_idle_instance_does_not_hoard() -> None:
    policy = Sangam(100)
    for _ in range(50):
        policy.choose([cache("a")], budget())
    rows = [*(full(f"r{n}", 60) for n in range(5)), cache("a")]
    # a pass's worth was kept, and this one earns 84
    assert names(policy.choose(rows, budget())) == ["r0", "r1", "r2", "a"]


def test_the_schedulers_limit_wins_over_what_is_carried() -> None:
    policy = Sangam(200)
    rows = [full("r0", 60), full("r1", 60), full("r2", 60), cache("a")]
    assert names(policy.choose(rows, budget(70))) == ["r0", "a"]
    assert names(policy.choose(rows[1:], budget(70))) == ["r1", "a"]
    assert names(Sangam(200).choose(rows, budget())) == ["r0", "r1", "r2", "a"]


@settings(deadline=None)
@given(st.integers(1, N_TOKENS), N_QUANTUM, st.integers(1, 12))
def test_a_recompute_has_its_turn_whatever_the_cache_rows(
    n_tokens: int, quantum: int, n_others: int
) -> None:
    """Cache rows come again without end, and more of them than the pass's worth."""
    policy = Sangam(quantum)
    least = max(quantum // LEAST_SHARE, 1)
    line = {f"c{n}": 0 for n in range(n_others)} | {"full": 0}
    bound = math.ceil(n_tokens / least) + len(line)
    for number in range(1, bound + 1):
        order = sorted(line, key=line.__getitem__)
        rows = [full(r, n_tokens) if r == "full" else cache(r) for r in order]
        chosen = names(policy.choose(rows, budget()))
        if "full" in chosen:
            return
        line |= dict.fromkeys(chosen, number)
    pytest.fail(f"it waited for {bound} passes")


@settings(deadline=None)
@given(REQUESTS, st.integers(1, N_TOKENS))
def test_passes_with_cache_rows_spend_what_was_earned(
    requests: list[Request], quantum: int
) -> None:
    """Over any stretch of passes in which something could be held up, recomputes cost no more than
    the stretch earned and what was there before: a pass's worth, or the longest row's."""
    bound = max(quantum, *(r.n_keys for r in requests))
    left = 0
    for rows in Passes(Sangam(quantum), requests):
        is_held_up = any(row.kind == "cache" for row in rows)
        left = min(left + quantum - full_tokens(rows), 0) if is_held_up else 0
        assert left >= -bound


# --- static --------------------------------------------------------------------------------------


def test_the_next_batch_waits_for_the_slowest() -> None:
    requests = [Request("slow", 64, 3, 2), Request("fast", 64, 1, 0), Request("late", 64, 1, 1)]
    policy = Static()
    first, second, third = requests
    passes = Passes(policy, [first, second])
    assert names(passes.run()) == ["slow", "fast"]
    passes.requests.append(third)
    while not first.is_done():
        assert names(passes.run()) == ["slow"]
    assert names(passes.run()) == ["late"]


def test_a_batch_is_as_many_as_can_run_in_one_pass() -> None:
    requests = [Request(f"r{n}", 100, 1, 1) for n in range(5)]
    passes = Passes(Static(), requests)
    seen = [names(rows) for rows in passes]
    assert seen == [["r0", "r1"]] * 2 + [["r2", "r3"]] * 2 + [["r4"]] * 2


def test_who_is_put_off_by_the_limit_belongs_to_the_batch() -> None:
    requests = [Request(f"r{n}", 100, 1, 1) for n in range(3)]
    passes = Passes(Static(), requests, n_full=100)
    assert [names(rows) for rows in passes] == [
        ["r0"], ["r1", "r0"], ["r1"], ["r2"], ["r2"]
    ]  # fmt: skip


# --- in the engine -------------------------------------------------------------------------------


def request(name: str, n_prompt: int, n_output: int, seed: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=[1 + index % 50 for index in range(n_prompt)],
        spec=DecodingSpec(
            n_output=n_output, block_length=8, seed=seed, temperature=0.7, ignore_eos=True
        ),
        step=0,
        canvas=[MASKED] * n_output,
        credit=Credit(0.3, 10**6),
    )


def denoise(model: Model, name: PlanPolicyName, cache_mode: CacheMode) -> dict[str, list[int]]:
    engine = Engine(
        model,
        cache_mode=cache_mode,
        n_kv_tokens=320,
        max_batch_tokens=96,
        plan_policy=build_plan_policy(name, n_tokens=40),
    )
    sizes = [(5, 24), (20, 8), (40, 16), (3, 32), (30, 20), (60, 24)]
    texts: dict[str, list[int]] = {}
    for seed, (n_prompt, n_output) in enumerate(sizes):
        engine.add(request(f"r{seed}", n_prompt, n_output, seed))
        drop(engine, engine.step().steps, texts)  # type: ignore[union-attr]
    while engine.has_work():
        output = engine.step()
        assert output is not None
        drop(engine, output.steps, texts)
    assert engine.n_free_kv_tokens == (0 if cache_mode == "none" else 320)
    assert len(texts) == len(sizes)
    return texts


def drop(engine: Engine, steps: list[StepOutput], texts: dict[str, list[int]]) -> None:
    for step in steps:
        if step.finish_reason is not None:
            texts[step.request_id] = engine.canvas(step.request_id)
            engine.remove(step.request_id)


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_texts_are_the_same_under_every_policy(model: Model, cache_mode: CacheMode) -> None:
    first, *others = (denoise(model, name, cache_mode) for name in POLICIES)
    assert all(texts == first for texts in others)


def test_a_batch_goes_on_when_a_member_is_taken_away(model: Model) -> None:
    engine = Engine(
        model, cache_mode="dual", n_kv_tokens=320, max_batch_tokens=96, plan_policy=Static()
    )
    engine.add(request("gone", 8, 24, 0))
    engine.step()
    engine.add(request("next", 8, 8, 1))
    engine.set_credit("gone", Credit(0.3, 10**6, 1))  # it waits for credit, and so does the next
    assert not engine.has_work()
    assert engine.step() is None
    engine.remove("gone")
    assert engine.has_work()
    output = engine.step()
    assert output is not None
    assert [step.request_id for step in output.steps] == ["next"]
