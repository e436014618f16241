"""The engine's rules: credit, fairness, pages, EOS, quota, statistics. Equality with others is in
test_golden and test_invariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dilaserve.errors import InvalidRequestError
from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine import runner
from dilaserve_gpu_worker.engine.batch import build_batch
from dilaserve_gpu_worker.engine.engine import Engine, Plan
from dilaserve_gpu_worker.engine.sequence import Floats, Row
from dilaserve_gpu_worker.engine.types import (
    BatchOutput,
    Credit,
    EngineRequest,
    NeverFitsError,
    NotFiniteError,
    StepOutput,
)
from dilaserve_gpu_worker.models.model import Model

FAR = 10**6


def request(
    request_id: str = "r",
    *,
    n_prompt: int = 5,
    n_output: int = 16,
    block_length: int = 8,
    threshold: float = 0.9,
    until_block: int = FAR,
    until_step: int | None = None,
    quota: int | None = None,
    ignore_eos: bool = True,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt=[1 + index % 50 for index in range(n_prompt)],
        spec=DecodingSpec(
            n_output=n_output, block_length=block_length, seed=3, ignore_eos=ignore_eos
        ),
        step=0,
        canvas=[MASKED] * n_output,
        credit=Credit(threshold, until_block, until_step),
        quota=quota,
    )


def new_engine(
    model: Model,
    *,
    cache_mode: CacheMode = "dual",
    n_kv_tokens: int = 1024,
    max_batch_tokens: int = 1024,
) -> Engine:
    return Engine(
        model,
        cache_mode=cache_mode,
        n_kv_tokens=n_kv_tokens,
        max_batch_tokens=max_batch_tokens,
    )


def run(engine: Engine) -> list[StepOutput]:
    steps = []
    while (output := engine.step()) is not None:
        steps += output.steps
    return steps


Decide = Callable[[Plan, Tensor], None]


def run_with(engine: Engine, decide: Decide) -> list[StepOutput]:
    """Like `run`, with logits that a test writes: rows are the candidates in order."""
    steps = []
    while (plan := engine.plan()) is not None:
        scores = engine.forward(plan)
        decide(plan, scores.logits_MV)
        steps += engine.unmask(plan, scores).steps
    return steps


# --- steps and blocks ----------------------------------------------------------------------------


def test_a_request_runs_block_by_block_to_its_end(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(n_output=20))
    steps = run(engine)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert {step.block for step in steps} == {0, 1, 2}
    assert [s.kind for s in steps] == [
        "recompute" if i == 0 or steps[i - 1].block != s.block else "cache"
        for i, s in enumerate(steps)
    ]
    assert all(s.block * 8 <= p < s.block * 8 + 8 for s in steps for p in s.positions)
    assert sorted(p for s in steps for p in s.positions) == list(range(20))
    assert [s.finish_reason for s in steps] == [None] * (len(steps) - 1) + ["length"]
    assert steps[-1].n_unmasked == 20
    assert steps[-1].n_block_masked == 0
    canvas = engine.canvas("r")
    assert all(canvas[p] == t for s in steps for p, t in zip(s.positions, s.tokens, strict=True))
    assert engine.step_of("r") == len(steps)


def test_without_a_cache_every_step_recomputes(model: Model) -> None:
    engine = new_engine(model, cache_mode="none", n_kv_tokens=0)
    engine.add(request())
    assert {step.kind for step in run(engine)} == {"recompute"}


def test_quota_commits_that_many_a_step(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(quota=3))
    assert [len(step.positions) for step in run(engine)] == [3, 3, 2, 3, 3, 2]


def test_threshold_of_a_step_is_that_of_its_credit(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(threshold=1.0, until_step=2))
    first = run(engine)
    engine.set_credit("r", Credit(0.0, FAR))
    rest = run(engine)
    assert [(s.threshold, len(s.positions)) for s in first] == [(1.0, 1), (1.0, 1)]
    assert [(s.threshold, len(s.positions)) for s in rest] == [(0.0, 6), (0.0, 8)]


def test_shifted_logits_commit_the_first_position_when_a_block_is_recomputed(
    random_dream: Model,
) -> None:
    """No cache step computes the hidden state that predicts it, that of the position before."""
    engine = new_engine(random_dream)
    engine.add(request(n_output=20, threshold=0.0))
    steps = run(engine)
    assert [(s.kind, s.positions) for s in steps] == [
        (kind, positions)
        for start, stop in ((0, 8), (8, 16), (16, 20))
        for kind, positions in (
            ("recompute", [start]),
            ("cache", list(range(start + 1, stop))),
        )
    ]


def test_a_block_without_its_first_token_recomputes_where_logits_are_shifted(
    random_dream: Model,
) -> None:
    """As a canvas may come from a worker without a cache."""
    engine = new_engine(random_dream)
    canvas = [MASKED, 5, 6] + [MASKED] * 13
    engine.add(replace(request(), step=2, canvas=canvas))
    output = engine.step()
    assert output is not None
    assert [(s.kind, s.positions) for s in output.steps] == [("recompute", [0])]
    assert output.n_rebuilds == 0


@pytest.mark.parametrize("n_prompt", [0, 7])
def test_shifted_logits_come_from_the_position_before(random_dream: Model, n_prompt: int) -> None:
    """In a batch, too; the first position of all keeps its own."""
    engine = new_engine(random_dream, cache_mode="none")
    for index in range(3):
        engine.add(request(f"r{index}", n_prompt=n_prompt, n_output=16, threshold=1.0))
    plan = engine.plan()
    assert plan is not None
    batch = build_batch(plan.rows, shift=1)
    length = n_prompt + 16
    expected = [
        row * length + max(n_prompt + position - 1, 0) for row in range(3) for position in range(8)
    ]
    assert batch.logit_rows_M[:24].tolist() == expected


# --- credit --------------------------------------------------------------------------------------


def test_credit_ends_at_a_block(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(until_block=0))
    assert engine.has_work()
    assert {step.block for step in run(engine)} == {0}
    assert not engine.has_work()
    engine.set_credit("r", Credit(0.9, until_block=1))
    assert engine.has_work()
    assert {step.block for step in run(engine)} == {1}


def test_credit_ends_at_a_step(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(until_step=0, threshold=1.0))
    assert run(engine) == []
    engine.set_credit("r", Credit(1.0, FAR, until_step=3))
    assert [step.step for step in run(engine)] == [1, 2, 3]
    engine.set_credit("r", Credit(1.0, FAR, until_step=3))
    assert not engine.has_work()


def test_rows_that_recompute_are_put_off_beyond_their_limit(model: Model) -> None:
    """Three requests of 21 tokens. With 25, one starts its block in a pass, and those that have
    run from the cache beside it; whoever was put off comes first."""
    alone, together = new_engine(model), new_engine(model)
    names = ["a", "b", "c"]
    for engine in (alone, together):
        for name in names:
            engine.add(request(name, threshold=1.0))
    together.limit_recomputes(25)
    rows = []
    while (plan := together.plan()) is not None:
        rows.append([(row.sequence.request_id, row.kind) for row in plan.rows])
        together.unmask(plan, together.forward(plan))
    assert [sorted(row) for row in rows[:4]] == [
        [("a", "recompute")],
        [("a", "cache"), ("b", "recompute")],
        [("a", "cache"), ("b", "cache"), ("c", "recompute")],
        [("a", "cache"), ("b", "cache"), ("c", "cache")],
    ]
    assert all(sum(kind == "recompute" for _, kind in row) <= 1 for row in rows)
    run(alone)
    assert [alone.canvas(name) for name in names] == [together.canvas(name) for name in names]


def test_a_row_above_the_limit_has_its_turn(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request("a"))
    engine.add(request("long", n_prompt=60))
    engine.limit_recomputes(0)
    steps = run(engine)
    assert {step.request_id for step in steps if step.finish_reason} == {"a", "long"}
    engine.add(request("b"))
    engine.add(request("c"))
    engine.limit_recomputes(None)
    plan = engine.plan()
    assert plan is not None
    assert len(plan.rows) == 2


def test_no_rebuild_without_credit(model: Model) -> None:
    engine = new_engine(model)
    half_done = replace(request(until_step=4), step=4, canvas=[7, MASKED, 9] + [MASKED] * 13)
    engine.add(half_done)
    assert engine.step() is None


def test_a_rebuild_reports_no_step_and_keeps_the_canvas(model: Model) -> None:
    engine = new_engine(model)
    canvas = [7, MASKED, 9] + [MASKED] * 13
    engine.add(replace(request(), step=4, canvas=canvas))
    rebuild = engine.step()
    assert isinstance(rebuild, BatchOutput)
    assert (rebuild.n_rebuilds, rebuild.steps, rebuild.n_tokens) == (1, [], 21)
    assert engine.canvas("r") == canvas
    assert engine.step_of("r") == 4
    following = engine.step()
    assert following is not None
    assert [(s.step, s.kind) for s in following.steps] == [(5, "cache")]
    assert following.n_tokens == 8


# --- EOS -----------------------------------------------------------------------------------------


def writer(tokens_of_position: dict[int, tuple[int, float]]) -> Decide:
    """Logits that want these tokens with these margins, and token 1 weakly elsewhere."""

    @torch.inference_mode()
    def decide(plan: Plan, logits: Tensor) -> None:
        logits.zero_()
        index = 0
        for row in plan.rows:
            for position in row.candidates.tolist():
                token, margin = tokens_of_position.get(position, (1, 1.0))
                logits[index, token] = margin
                index += 1

    return decide


EOS = 59


def test_eos_ends_once_everything_before_it_is_committed(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(ignore_eos=False))
    want = {2: (EOS, 9.0), 0: (5, 8.0), 1: (6, 7.0), 7: (8, 8.5)}
    steps = run_with(engine, writer(want))
    assert [(s.positions, s.finish_reason) for s in steps] == [([0, 1, 2, 7], "stop")]
    assert engine.canvas("r")[:3] == [5, 6, EOS]
    assert not engine.has_work()


def test_eos_waits_for_what_is_before_it(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(ignore_eos=False, threshold=0.99))
    steps = run_with(engine, writer({2: (EOS, 20.0), 0: (5, 3.0), 1: (6, 2.0)}))
    assert [(s.positions, s.finish_reason) for s in steps] == [
        ([2], None),
        ([0], None),
        ([1], "stop"),
    ]
    assert engine.canvas("r") == [5, 6, EOS] + [MASKED] * 13
    assert engine.n_free_kv_tokens == 1024


def test_eos_is_ignored_when_asked(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(ignore_eos=True))
    steps = run_with(engine, writer(dict.fromkeys(range(16), (EOS, 20.0))))
    assert [s.finish_reason for s in steps] == [None, "length"]


def test_a_model_that_wants_the_mask_token_does_not_hang(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request())
    steps = run_with(engine, writer(dict.fromkeys(range(16), (model.config.mask_id, 30.0))))
    assert len(steps) == 16
    assert model.config.mask_id not in engine.canvas("r")


def test_a_request_restored_after_its_end_does_not_run(model: Model) -> None:
    engine = new_engine(model)
    engine.add(replace(request(ignore_eos=False), canvas=[4, EOS] + [MASKED] * 14))
    assert engine.step() is None


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_statistics_are_of_all_output_positions(model: Model, cache_mode: CacheMode) -> None:
    """A recompute step looks at every masked position, a cache step at those of its block; what is
    committed keeps its confidence."""
    engine = new_engine(model, cache_mode=cache_mode)
    engine.add(request(n_output=21, quota=3))
    known = np.zeros(21)
    while (plan := engine.plan()) is not None:
        [row] = plan.rows
        masked = [i for i, token in enumerate(engine.canvas("r")) if token == MASKED]
        if row.kind == "cache":
            masked = [position for position in masked if position // 8 == row.block]
        known[masked] = confidences_of(model, engine, row)[masked]
        assert (known > 0).all()
        [step] = engine.unmask(plan, engine.forward(plan)).steps
        got = [step.stats.min, step.stats.q25, step.stats.median, step.stats.q75, step.stats.mean]
        expected = [*np.quantile(known, [0, 0.25, 0.5, 0.75]), known.mean()]
        assert got == pytest.approx(expected, rel=1e-5)


def confidences_of(model: Model, engine: Engine, row: Row) -> Floats:
    """Per canvas position, in fp64, by the engine's own forward pass over the row with all the
    positions that it computes as candidates; 0 for the others."""
    computed = np.arange(row.start, row.start + len(row.tokens)) - row.sequence.n_prompt
    computed = computed[computed >= 0]
    looking = replace(row, candidates=computed, outlook=computed[:0])
    logits = engine.forward(Plan([looking], 0.0)).logits_MV[: len(computed)].double()
    probabilities = logits.softmax(-1)
    probabilities[:, model.config.mask_id] = 0
    confidences = np.zeros(21)
    confidences[computed] = probabilities.amax(-1).numpy()
    return confidences


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_statistics_after_a_move_are_those_of_the_undisturbed_run(
    model: Model, cache_mode: CacheMode
) -> None:
    """From every step on, the rebuild included: it looks at the later blocks, too."""
    undisturbed = run(held_by_new_engine(model, cache_mode, request(n_output=28)))
    assert len({step.stats for step in undisturbed}) == len(undisturbed) > 10
    canvas, confidences = [MASKED] * 28, [0.0] * 28
    for number, step in enumerate(undisturbed[:-1], start=1):
        for position, token, confidence in zip(
            step.positions, step.tokens, step.confidences, strict=True
        ):
            canvas[position], confidences[position] = token, confidence
        moved = replace(
            request(n_output=28), step=number, canvas=list(canvas), confidences=list(confidences)
        )
        rest = run(held_by_new_engine(model, cache_mode, moved))
        assert [step.stats for step in rest] == [step.stats for step in undisturbed[number:]]


def held_by_new_engine(model: Model, cache_mode: CacheMode, held: EngineRequest) -> Engine:
    engine = new_engine(model, cache_mode=cache_mode)
    engine.add(held)
    return engine


def test_a_large_vocabulary_is_looked_at_in_parts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(held_by_new_engine(model, "dual", request(n_output=200)))
    monkeypatch.setattr(runner, "_OUTLOOK_ELEMENTS", 1000)
    assert run(held_by_new_engine(model, "dual", request(n_output=200))) == whole


def test_nan_in_later_blocks_is_told(model: Model) -> None:
    engine = held_by_new_engine(model, "dual", request())
    plan = engine.plan()
    assert plan is not None
    scores = engine.forward(plan)
    with torch.inference_mode():
        scores.outlook_K[3] = float("nan")
    with pytest.raises(NotFiniteError, match="NaN"):
        engine.unmask(plan, scores)


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_kv_tokens", "max_batch_tokens", "n_output", "limit"),
    [
        (64, 1024, 60, r"the KV pool \(64\)"),
        (1024, 99, 60, r"the token budget of a pass \(99\)"),
        (2048, 2048, 473, r"max_sequence_length \(512\)"),
    ],
)
def test_what_never_fits_is_refused(
    model: Model, n_kv_tokens: int, max_batch_tokens: int, n_output: int, limit: str
) -> None:
    engine = new_engine(model, n_kv_tokens=n_kv_tokens, max_batch_tokens=max_batch_tokens)
    with pytest.raises(NeverFitsError, match=f"request r has {n_output + 40} tokens.*{limit}"):
        engine.add(request(n_prompt=40, n_output=n_output))
    assert not engine.holds("r")


def test_what_just_fits_runs(model: Model) -> None:
    engine = new_engine(model, n_kv_tokens=128, max_batch_tokens=100)
    engine.add(request(n_prompt=60, n_output=40))
    assert run(engine)[-1].finish_reason == "length"


def test_more_than_fits_now_waits_and_nobody_starves(model: Model) -> None:
    """Two long requests need the whole pool, each; short ones keep coming."""
    engine = new_engine(model, n_kv_tokens=128, max_batch_tokens=128)
    for name in ("long-1", "long-2"):
        engine.add(request(name, n_prompt=50, n_output=60))
    for index in range(40):
        engine.add(request(f"short-{index}", n_output=8))
    finished = [step.request_id for step in run(engine) if step.finish_reason]
    assert len(finished) == 42
    assert finished[0] == "long-1"
    assert finished[1] == "long-2"


def test_the_token_budget_is_shared_in_turn(model: Model) -> None:
    engine = new_engine(model, cache_mode="none", max_batch_tokens=100)
    for index in range(9):
        engine.add(request(f"r{index}", n_prompt=10 + index, n_output=20, threshold=1.0))
    passes: list[set[str]] = []
    while (output := engine.step()) is not None:
        assert output.n_tokens <= 100
        passes.append({step.request_id for step in output.steps})
    for name in (f"r{index}" for index in range(9)):
        ran = [number for number, names in enumerate(passes) if name in names]
        assert len(ran) == 20
        # Any two fit together, so the two that waited longest run, and nine take turns in five.
        assert max(b - a for a, b in zip([-1, *ran], ran, strict=False)) <= 5


def test_a_row_as_large_as_the_budget_runs_among_small_ones(model: Model) -> None:
    engine = new_engine(model, max_batch_tokens=100)
    engine.add(request("large", n_prompt=58, n_output=42, block_length=32))
    for index in range(10):
        engine.add(request(f"small-{index}", threshold=1.0))
    for _ in range(12):
        engine.step()
    assert engine.step_of("large") >= 1


def test_two_thousand_requests_return_every_page(model: Model) -> None:
    engine = new_engine(model, n_kv_tokens=320, max_batch_tokens=256)
    for index in range(2000):
        engine.add(request(f"r{index}", n_prompt=index % 40, n_output=8, threshold=0.0))
    finished = []
    while (output := engine.step()) is not None:
        for step in output.steps:
            finished.append(step.request_id)
            assert step.finish_reason == "length"
            engine.remove(step.request_id)
        if len(finished) % 7 == 0 and engine.holds(f"r{1999 - len(finished) // 7}"):
            engine.remove(f"r{1999 - len(finished) // 7}")
    assert len(finished) > 1000
    assert engine.n_free_kv_tokens == 320


def test_removing_in_the_middle_frees_its_pages(model: Model) -> None:
    engine = new_engine(model, n_kv_tokens=128)
    engine.add(request("a", n_prompt=50, n_output=60))
    engine.add(request("b", n_prompt=50, n_output=60))
    engine.step()
    assert engine.n_free_kv_tokens == 0
    engine.remove("a")
    assert engine.n_free_kv_tokens == 128
    assert {step.request_id for step in run(engine)} == {"b"}


# --- what is held --------------------------------------------------------------------------------


def test_holding_and_forgetting(model: Model) -> None:
    engine = new_engine(model)
    assert not engine.has_work()
    engine.add(request())
    assert engine.holds("r")
    with pytest.raises(ValueError, match="held already"):
        engine.add(request())
    run(engine)
    assert engine.holds("r")
    engine.remove("r")
    engine.remove("r")
    assert not engine.holds("r")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": [1, 61]}, "prompt", "token 61, outside the model's vocabulary of 61"),
        ({"prompt": [-1]}, "prompt", "token -1"),
        ({"canvas": [MASKED] * 3}, "canvas", "3 positions, n_output is 16"),
        ({"quota": 0}, "quota", "below 1"),
        ({"confidences": [0.5]}, "confidences", "1 confidences for 16 canvas positions"),
    ],
)
def test_malformed_requests_are_refused(
    model: Model, change: dict[str, object], param: str, words: str
) -> None:
    engine = new_engine(model)
    with pytest.raises(InvalidRequestError, match=words) as error:
        engine.add(replace(request(), **change))  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("block_length", 0)],
)
def test_malformed_specs_are_refused(model: Model, param: str, value: float) -> None:
    fields = {"n_output": 16, "block_length": 8, "seed": 1, param: value}
    bad = replace(request(), spec=DecodingSpec(**fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as error:
        new_engine(model).add(bad)
    assert error.value.param == param


def test_an_empty_prompt_runs(model: Model) -> None:
    engine = new_engine(model)
    engine.add(request(n_prompt=0))
    assert run(engine)[-1].finish_reason == "length"
