"""Captured passes, with a tape in the place of a CUDA graph: the shapes, the padding, the replay,
and what happens when a pass fits none. Real captures are under tests/gpu."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.attention import Room, Run
from dilaserve_gpu_worker.engine.batch import Batch, build_batch
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.graphs import (
    Captured,
    GraphOptions,
    GraphShapes,
    StepGraphs,
    key_bucket,
    padded,
    row_bucket,
)
from dilaserve_gpu_worker.engine.runner import make_runner
from dilaserve_gpu_worker.engine.tape import TapeCapture
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.transfer import StaticArrays
from dilaserve_gpu_worker.weights import load_model

CPU = torch.device("cpu")
BLOCK = 8
STATIC_BACKENDS = ["masked", "masked_paged"]
FAR = 10**6


@pytest.fixture(scope="module")
def model(make_folder: Any) -> Model:
    """With torch's operators alone, as on a GPU: a tape records no others."""
    return load_model(make_folder(), fuses=False)


@pytest.fixture(scope="module")
def grouped_model(make_folder: Any) -> Model:
    return load_model(make_folder(n_kv_heads=2), fuses=False)


@pytest.fixture(scope="module")
def random_dream(make_dream_folder: Any) -> Model:
    return load_model(make_dream_folder(), fuses=False)


@dataclass
class CountingCapture:
    """A tape, and how often it was asked."""

    n_captures: int = 0
    n_most: int = FAR
    is_broken: bool = False
    shapes: list[Any] = field(default_factory=list)

    def has_room(self) -> bool:
        return self.n_captures < self.n_most

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        self.n_captures += 1
        if self.is_broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        return TapeCapture()(compute)


def request(name: str, n_prompt: int, n_output: int = 3 * BLOCK) -> EngineRequest:
    spec = DecodingSpec(n_output=n_output, block_length=BLOCK, seed=1, ignore_eos=True)
    prompt = [(7 * n_prompt + 3 * index) % 50 for index in range(n_prompt)]
    return EngineRequest(name, prompt, spec, 0, [MASKED] * n_output, Credit(0.97, FAR))


def engine(model: Model, attention: str, graphs: GraphOptions | None, **more: Any) -> Engine:
    options = {"cache_mode": "dual", "n_kv_tokens": 2048, "max_batch_tokens": 2048} | more
    return Engine(model, attention=attention, graphs=graphs, **options)


def options(capture: Any, **more: Any) -> GraphOptions:
    return GraphOptions(capture, block_length=BLOCK, min_uses=1, **more)


def course(engine: Engine, requests: list[EngineRequest]) -> tuple[list[Any], list[float]]:
    """What every pass decides, and how confident it is."""
    for each in requests:
        engine.add(each)
    taken, confidences = [], []
    while (output := engine.step()) is not None:
        for step in output.steps:
            taken.append((step.request_id, step.kind, step.positions, step.tokens))
            confidences += step.confidences
    return taken, confidences


def check_same_course(one: Engine, other: Engine, requests: list[EngineRequest]) -> None:
    (decided, confidences), expected = course(one, requests), course(other, requests)
    assert decided == expected[0]
    assert confidences == pytest.approx(expected[1], abs=1e-5)


# --- shapes ----------------------------------------------------------------------------------


def test_buckets_of_rows() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 33)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 40)
    ]


@given(st.integers(1, 10**6))
def test_buckets_of_keys_waste_little_and_are_few(n_keys: int) -> None:
    bucket = key_bucket(n_keys)
    assert bucket >= n_keys
    assert bucket == 256 or bucket <= 1.25 * n_keys
    assert key_bucket(bucket) == bucket


def test_there_are_few_buckets_of_keys() -> None:
    assert len({key_bucket(n) for n in range(1, 65536, 7)}) <= 4 * 8 + 1


def cache_batch(shapes: list[tuple[int, int, int]], *, page: int = 0, n_outlook: int = 0) -> Batch:
    """Of (rows, queries, keys), every row with pages of its own, from `page` on."""
    runs, written, keys, rows, start, first_key = [], [], [], [], 0, 0
    for n_rows, n_queries, n_keys in shapes:
        runs.append(Run(n_rows, n_queries, n_keys, start, first_key))
        for _ in range(n_rows):
            slots = page * 32 + np.arange(n_keys)
            page += -(-n_keys // 32)
            keys.append(slots)
            written.append(slots[-n_queries:])
            rows.append(start + np.arange(n_queries))
            start += n_queries
        first_key += n_rows * n_keys
    n_padding = -start % 32
    tokens = np.concatenate([1 + np.arange(start) % 50, np.zeros(n_padding, np.int64)])
    wanted = np.concatenate(rows)
    return Batch(
        tokens_T=tokens,
        positions_T=np.concatenate([np.arange(start) % 99, np.zeros(n_padding, np.int64)]),
        n_tokens=start,
        write_slots=np.concatenate(written),
        key_slots=np.concatenate(keys),
        runs=runs,
        logit_rows_M=np.pad(wanted, (0, -len(wanted) % 32)),
        outlook_rows_K=np.zeros(n_outlook, np.int64),
    )


def shapes(**changed: Any) -> GraphShapes:
    return replace(GraphShapes(BLOCK, 16, longest_key=256, counts_keys=True), **changed)


def test_a_pass_gets_the_smallest_shape_that_it_fits_in() -> None:
    batch = cache_batch([(2, BLOCK, 100), (1, 5, 37)])
    assert shapes().room_for(batch) == Room(4, 4 * BLOCK, BLOCK, 256, key_bucket(237 + BLOCK))
    assert shapes(counts_keys=False).room_for(batch) == Room(4, 4 * BLOCK, BLOCK, 256, 4 * 256)


def test_passes_that_fit_no_shape() -> None:
    recompute = Run(1, 40, 40, 0, None)
    batch = cache_batch([(2, BLOCK, 100)])
    assert shapes().room_for(batch) is not None
    assert shapes().room_for(replace(batch, runs=[*batch.runs, recompute])) is None
    assert shapes().room_for(cache_batch([(1, BLOCK + 1, 100)])) is None
    assert shapes().room_for(cache_batch([(17, BLOCK, 40)])) is None
    assert shapes().room_for(cache_batch([(2, BLOCK, 100)], n_outlook=32)) is None


# --- padding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("fewest_queries", "tolerance"), [(BLOCK, 0.0), (1, 2e-5)])
def test_padding_changes_no_bit_of_a_whole_row(
    model: Model, fewest_queries: int, tolerance: float
) -> None:
    """Of a row with fewer queries than the others the CPU's kernels sum in another order."""

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(fewest_queries, BLOCK), st.integers(9, 70)),
            min_size=1,
            max_size=3,
        )
    )
    def check(few_shapes: list[tuple[int, int, int]]) -> None:
        batch = cache_batch([(n, queries, queries + keys) for n, queries, keys in few_shapes])
        assert distance_when_padded(model, batch) <= tolerance

    check()


def distance_when_padded(model: Model, batch: Batch) -> float:
    """Of logits, keys and values."""
    room = shapes().room_for(batch)
    assert room is not None
    n_pages = 1 + int(max(batch.key_slots)) // 32
    plain, wide = (make_runner(model, n_pages + 1, "sdpa", mask_id=60) for _ in range(2))
    n = sum(run.n_rows * run.n_queries for run in batch.runs)
    logits = [
        plain.forward(batch).logits_MV[:n],
        wide.forward(padded(batch, room, scratch_page=n_pages)).logits_MV[:n],
    ]
    assert plain._pool is not None
    assert wide._pool is not None
    pools = zip(plain._pool.layer(1), wide._pool.layer(1), strict=True)
    pairs = [logits, *([one[: n_pages * 32], other[: n_pages * 32]] for one, other in pools)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_padding_touches_the_scratch_page_only() -> None:
    batch = cache_batch([(2, BLOCK, 40), (1, 3, 20)])
    room = shapes().room_for(batch)
    assert room is not None
    wide = padded(batch, room, scratch_page=100)
    real = set(batch.write_slots.tolist())
    assert set(wide.write_slots.tolist()) - real <= set(range(3200, 3232))
    assert [run.n_rows for run in wide.runs] == [2, 1, 1]
    assert wide.n_tokens == len(wide.write_slots) == 4 * BLOCK
    last = wide.runs[-1]
    assert last.first_key is not None
    assert wide.key_slots[last.first_key :].tolist() == list(range(3200, 3200 + BLOCK))


# --- replays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", STATIC_BACKENDS)
def test_replays_give_what_eager_passes_give(
    attention: str, model: Model, grouped_model: Model, random_dream: Model
) -> None:
    requests = [request(str(n), n_prompt=3 + 11 * n, n_output=20 + n) for n in range(5)]
    for each in (model, grouped_model, random_dream):
        capture = CountingCapture()
        replaying = engine(each, attention, options(capture))
        check_same_course(replaying, engine(each, attention, None), requests)
        graphs = replaying._runner._graphs
        assert graphs is not None
        assert graphs.graphs.n_replays > 10
        assert 0 < capture.n_captures < graphs.graphs.n_replays


@pytest.mark.parametrize("name", ["llada-mha", "dream-gqa"])
def test_replays_reach_the_golden_texts(name: str, request: pytest.FixtureRequest) -> None:
    of = "golden" if name == "llada-mha" else "dream"
    folder = request.getfixturevalue(f"{of}_folder")
    golden = load_model(folder, fuses=False)
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    cases = [case for case in cases if case["mode"] == "dual"]
    graphs = GraphOptions(TapeCapture(), block_length=16, min_uses=1)
    replaying = engine(golden, "masked", graphs)
    for case in cases:
        replaying.add(golden_request(case))
        while replaying.step() is not None:
            pass
        assert [*case["prompt"], *replaying.canvas("golden")] == case["sequence"]
        replaying.remove("golden")
    assert replaying.n_replays > len(cases)


def golden_request(case: dict[str, Any]) -> EngineRequest:
    n_output = case["gen_length"]
    spec = DecodingSpec(
        n_output=n_output, block_length=case["block_length"], seed=0, ignore_eos=True
    )
    quota = n_output // case["steps"] if case["threshold"] is None else None
    credit = Credit(case["threshold"] or 0.0, FAR)
    return EngineRequest("golden", case["prompt"], spec, 0, [MASKED] * n_output, credit, quota)


@pytest.mark.parametrize("attention", STATIC_BACKENDS)
def test_a_replay_gives_the_bits_of_its_shape(attention: str, model: Model) -> None:
    """The same pass, as the one that was captured and as a replay after others."""
    first = cache_batch([(2, BLOCK, 60), (1, 5, 33)])
    other = cache_batch([(1, BLOCK, 90), (2, 2, 29)], page=8)
    graphed = make_runner(model, 16, attention, mask_id=60, graphs=options(TapeCapture()))
    captured = graphed.forward(first).logits_MV.clone()
    assert not torch.equal(graphed.forward(other).logits_MV[:3], captured[:3])
    again = graphed.forward(first).logits_MV
    assert graphed._graphs is not None
    assert graphed._graphs.graphs.n_replays == 2
    assert torch.equal(captured, again)


def test_a_mixed_pass_and_a_long_block_run_eagerly(model: Model) -> None:
    capture = CountingCapture()
    longer = options(capture)
    runner = make_runner(model, 16, "masked", mask_id=60, graphs=longer)
    runner.forward(cache_batch([(1, BLOCK + 1, 40)]))
    assert capture.n_captures == 0
    runner.forward(cache_batch([(1, BLOCK, 40)]))
    assert capture.n_captures == 1


def test_without_a_cache_nothing_is_captured(model: Model) -> None:
    capture = CountingCapture()
    course(engine(model, "masked", options(capture), cache_mode="none"), [request("a", 9)])
    assert capture.n_captures == 0


# --- when to capture -------------------------------------------------------------------------

ARRAYS = [np.arange(3)]


def rooms() -> Iterator[Room]:
    return (Room(n, n * BLOCK, BLOCK, 64, 256) for n in range(1, 100))


def run(graphs: StepGraphs, room: Room) -> float:
    assert graphs.wants(room)
    output, _ = graphs.run(
        room, ARRAYS, lambda tensors: tensors[0] * 2, lambda arrays: StaticArrays(arrays, CPU)
    )
    return float(output.sum())


def test_a_shape_is_captured_at_its_second_use() -> None:
    capture = CountingCapture()
    graphs = StepGraphs(GraphOptions(capture, BLOCK))
    room = next(rooms())
    assert not graphs.wants(room)
    assert [run(graphs, room) for _ in range(3)] == [6.0] * 3
    assert (capture.n_captures, graphs.n_replays, len(graphs)) == (1, 2, 1)


def test_the_least_recently_used_goes() -> None:
    capture = CountingCapture()
    graphs = StepGraphs(options(capture, max_graphs=2))
    a, b, c = [room for room, _ in zip(rooms(), range(3), strict=False)]
    for room in (a, b, a, c):  # b goes
        run(graphs, room)
    assert (capture.n_captures, len(graphs)) == (3, 2)
    run(graphs, a)
    assert capture.n_captures == 3
    run(graphs, b)
    assert capture.n_captures == 4


def test_no_room_means_no_capture() -> None:
    graphs = StepGraphs(options(CountingCapture(n_most=1)))
    a, b = [room for room, _ in zip(rooms(), range(2), strict=False)]
    run(graphs, a)
    assert not graphs.wants(b)
    assert run(graphs, a) == 6.0


def test_a_capture_that_fails_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    capture = CountingCapture(is_broken=True)
    graphs = StepGraphs(options(capture))
    a, b = [room for room, _ in zip(rooms(), range(2), strict=False)]
    assert run(graphs, a) == 6.0  # the pass itself is served
    assert not graphs.wants(a)
    assert not graphs.wants(b)
    assert "no more passes are captured, others run one by one: operation not perm" in caplog.text


def test_an_engine_whose_captures_fail_serves_all_the_same(model: Model) -> None:
    requests = [request(str(n), 5 + n) for n in range(3)]
    broken = engine(model, "masked", options(CountingCapture(is_broken=True)))
    check_same_course(broken, engine(model, "masked", None), requests)


def test_what_would_wait_for_the_device_is_not_captured() -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        TapeCapture()(lambda: torch.ones(3) * torch.ones(3).sum().item())


def test_fused_kernels_cannot_be_captured(make_folder: Any) -> None:
    fused = load_model(make_folder())
    if not fused.is_fused:
        pytest.skip("this CPU has no AVX2, so that no kernels are fused")
    with pytest.raises(ValueError, match="fused kernels cannot be captured"):
        engine(fused, "masked", options(TapeCapture()))


def test_sdpa_cannot_be_captured(model: Model) -> None:
    with pytest.raises(ValueError, match="'sdpa' cannot be captured"):
        engine(model, "sdpa", options(TapeCapture()))


def test_a_plan_becomes_a_batch_of_cache_rows(model: Model) -> None:
    """The engine's own cache steps fit a shape; the first step of a block does not."""
    bare = engine(model, "sdpa", None)
    bare.add(replace(request("a", 10), credit=Credit(1.0, FAR)))
    plan = bare.plan()
    assert plan is not None
    assert shapes().room_for(build_batch(plan.rows, 0)) is None
    bare.step()
    plan = bare.plan()
    assert plan is not None
    assert shapes().room_for(build_batch(plan.rows, 0)) == Room(1, BLOCK, BLOCK, 256, 256)
