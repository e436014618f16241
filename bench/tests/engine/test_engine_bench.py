"""`dilaserve bench engine`: what is fed, and that the bare products are those of the pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from dilaserve.messages import CacheMode
from dilaserve_bench.command import bench
from dilaserve_bench.engine import command
from dilaserve_bench.engine.bare import BareProducts
from dilaserve_bench.engine.batching import measure_batching
from dilaserve_bench.engine.feed import Feed, Work, requests_of
from dilaserve_bench.engine.policies import measure_policies
from dilaserve_bench.engine.riders import Riders
from dilaserve_gpu_worker.engine.batch import build_batch
from dilaserve_gpu_worker.engine.engine import Engine, Plan
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName, build_plan_policy
from dilaserve_gpu_worker.engine.runner import Scores
from dilaserve_gpu_worker.engine.types import BatchOutput
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

TINY = Path(__file__).parents[3] / "models" / "tiny"
PACKED = "_linear_pointwise"
WORK = Work(vocab_size=100, n_prompt=20, outputs=(32, 64), threshold=0.5)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load_model(TINY)


def new_engine(
    model: Model, cache_mode: CacheMode = "dual", plan_policy: PlanPolicyName = "blockserve"
) -> Engine:
    return Engine(
        model,
        cache_mode=cache_mode,
        n_kv_tokens=1024,
        max_batch_tokens=1024,
        plan_policy=build_plan_policy(plan_policy, n_tokens=100),
    )


class Products(TorchDispatchMode):
    """Counts matrix products and rows of attentions by the shapes of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[Any, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        if name in ("linear", PACKED, "mm", "addmm", "bmm"):
            self.seen[name, tuple(shapes)] += 1
        if "scaled_dot_product" in name:  # in how many calls is the engine's own affair
            self.seen[name, tuple(shape[1:] for shape in shapes)] += shapes[0][0]
        return func(*args, **(kwargs or {}))

    def as_torch_does(self) -> Counter[tuple[str, tuple[Any, ...]]]:
        """The same without packed matrices."""
        plain: Counter[tuple[str, tuple[Any, ...]]] = Counter()
        for (name, shapes), n in self.seen.items():
            plain["linear" if name == PACKED else name, shapes] += n
        return plain


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_bare_products_are_those_of_the_pass(model: Model, cache_mode: CacheMode) -> None:
    """Of the engine's own kernels, and as torch computes them."""
    engine, bare = new_engine(model, cache_mode), BareProducts(model)
    kernels = BareProducts(model, is_packed=model.is_packed)
    feed = Feed(engine, requests_of(WORK), 3)
    kinds: set[str] = set()
    while len(kinds) < (1 if cache_mode == "none" else 2):
        feed.fill()
        plan = engine.plan()
        assert plan is not None
        kinds |= {row.kind for row in plan.rows}
        with Products() as wanted:
            scores = engine.forward(plan)
        batch = build_batch(plan.rows, bare.shift)
        for products in (bare, kernels):
            products.warm_up([batch])
        with Products() as found:
            bare.run(batch)
        with Products() as as_the_engine:
            kernels.run(batch)
        assert wanted.seen.total() >= 5 * model.config.n_layers
        assert found.seen == wanted.as_torch_does()
        assert as_the_engine.seen == wanted.seen
        feed.drop_finished(engine.unmask(plan, scores))


def test_bare_products_make_room_before_they_are_timed(model: Model) -> None:
    engine, bare = new_engine(model, "dual"), BareProducts(model)
    feed = Feed(engine, requests_of(WORK), 3)
    batches = []
    for _ in range(12):
        feed.fill()
        plan = engine.plan()
        assert plan is not None
        batches.append(build_batch(plan.rows, bare.shift))
        feed.drop_finished(engine.unmask(plan, engine.forward(plan)))
    bare.warm_up(batches)
    before = [tensor.data_ptr() for tensor in (bare._scratch, *bare._pools)]
    for batch in batches:
        bare.run(batch)
    assert [tensor.data_ptr() for tensor in (bare._scratch, *bare._pools)] == before


@pytest.mark.parametrize("is_continuous", [True, False])
def test_feed_keeps_so_many_at_work(model: Model, is_continuous: bool) -> None:
    engine = new_engine(model)
    feed = Feed(engine, islice(requests_of(WORK), 7), 3, is_continuous=is_continuous)
    ended: list[str] = []
    batches: list[int] = []
    while feed.fill():
        output = engine.step()
        assert output is not None
        batches.append(len(output.steps))
        ended += feed.drop_finished(output)
    assert sorted(ended) == [str(number) for number in range(7)]
    assert max(batches) == 3
    rises = sum(later > earlier for earlier, later in pairwise(batches))
    assert rises == (0 if is_continuous else 1)  # 3 + 3 + 1 requests: 3, falling, 3, falling to 1
    assert engine.n_free_kv_tokens == 1024


def test_batching_compares_the_same_requests(model: Model) -> None:
    work = Work(vocab_size=100, n_prompt=20, outputs=(96, 32, 32), threshold=0.5)
    engine = new_engine(model)
    n_passes = 0

    def clock() -> float:
        return float(n_passes)

    forward = engine.forward

    def counted(plan: Plan) -> Scores:
        nonlocal n_passes
        n_passes += 1
        return forward(plan)

    engine.forward = counted  # type: ignore[method-assign]
    found = measure_batching(
        engine, work, cache_mode="dual", concurrency=2, n_requests=6, n_rounds=1, clock=clock
    )
    assert found.over_static == pytest.approx(found.continuous / found.static)
    assert found.over_leaving == pytest.approx(found.continuous / found.leaving)
    assert found.over_padded == pytest.approx(found.continuous / found.padded)
    assert found.continuous > found.static == found.leaving > found.padded  # by this clock
    assert found.fewer_passes == pytest.approx(found.over_static)
    assert engine.n_free_kv_tokens == 1024


def test_riders_keep_a_static_batch_at_its_size(model: Model) -> None:
    """And change no token: those that are left decode as they do alone."""
    work = Work(vocab_size=100, n_prompt=20, outputs=(96, 32, 40), threshold=0.5)
    alone = texts_of(new_engine(model), work, 3)
    engine = new_engine(model)
    seen: list[tuple[int, int]] = []
    forward, unmask = engine.forward, engine.unmask

    def watched_forward(plan: Plan) -> Scores:
        widths = {len(row.tokens) for row in plan.rows if row.kind == "cache"}
        assert widths <= {8, 32}  # the last block of 40 is one of 8
        seen.append((len(plan.rows), 0))
        return forward(plan)

    def watched_unmask(plan: Plan, scores: Scores) -> BatchOutput:
        output = unmask(plan, scores)
        seen[-1] = seen[-1][0], len(plan.rows)
        return output

    engine.forward, engine.unmask = watched_forward, watched_unmask  # type: ignore[method-assign]
    riders = Riders(engine, "dual")
    feed = Feed(engine, islice(requests_of(work), 3), 3, is_continuous=False)
    feed.fill()
    ended: dict[str, list[int]] = {}
    while feed.n_held:
        output = riders.step()
        assert output is not None
        ended |= {
            s.request_id: engine.canvas(s.request_id) for s in output.steps if s.finish_reason
        }
        feed.drop_finished(output)
    assert {n for n, _ in seen} == {3}
    assert {n for _, n in seen} >= {3, 1}
    assert ended == alone
    riders.clear()
    assert riders.step() is None


def test_who_starts_late_on_pages_of_a_rider_is_refused(model: Model) -> None:
    """The budget lets one of the two start in a pass, in which the first one ends."""
    work = Work(vocab_size=100, n_prompt=20, outputs=(32, 64), threshold=0.0)
    engine = Engine(model, cache_mode="dual", n_kv_tokens=1024, max_batch_tokens=84)
    riders = Riders(engine, "dual")
    feed = Feed(engine, islice(requests_of(work), 2), 2, is_continuous=False)
    feed.fill()
    output = riders.step()
    assert output is not None
    assert feed.drop_finished(output) == ["0"]
    with pytest.raises(RuntimeError, match="request 1 starts late, on KV pages of 0, which"):
        riders.step()


def texts_of(engine: Engine, work: Work, n_requests: int) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for request in islice(requests_of(work), n_requests):
        engine.add(request)
        while engine.step() is not None:
            pass
        texts[request.request_id] = engine.canvas(request.request_id)
        engine.remove(request.request_id)
    return texts


def test_plan_policies_are_compared_on_the_same_requests(model: Model) -> None:
    """By a clock that counts passes."""
    work = Work(vocab_size=100, n_prompt=20, outputs=(96, 32, 32, 64), threshold=0.5)
    policies: tuple[PlanPolicyName, ...] = ("blockserve", "sangam", "static")
    n_passes = 0

    def counting(engine: Engine) -> Engine:
        step = engine.step

        def counted() -> BatchOutput | None:
            nonlocal n_passes
            n_passes += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        return engine

    engines = {name: counting(new_engine(model, plan_policy=name)) for name in policies}
    rows = measure_policies(
        engines,
        work,
        concurrency=3,
        n_requests=8,
        n_rounds=1,
        clock=lambda: float(n_passes),
    )
    assert [row.plan_policy for row in rows] == list(policies)
    blockserve, sangam, static = rows
    assert all(row.pass_ms == row.pass_p99_ms == 1000 for row in rows)
    assert blockserve.gap_ms == blockserve.gap_p99_ms == 1000  # nobody ever waits
    assert blockserve.n_passes < sangam.n_passes  # room for one recompute of two, or in two passes
    assert blockserve.n_passes < static.n_passes
    assert blockserve.request_ms < static.request_ms
    for row in rows:
        assert row.tokens_per_s == pytest.approx(2 * (96 + 32 + 32 + 64) / row.n_passes)
    assert all(engine.n_free_kv_tokens == 1024 for engine in engines.values())


def test_command_prints_rows_and_what_is_left() -> None:
    options = ["--modes", "none,dual", "--concurrency", "1,2", "--passes", "2", "--rounds", "1"]
    options += ["--output", "32", "--mixed", "32,64", "--requests", "3", "--json"]
    result = CliRunner().invoke(bench, ["engine", "--model", str(TINY), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["mode"], row["concurrency"]) for row in found["rows"]] == [
        ("none", 1), ("none", 2), ("dual", 1), ("dual", 2)
    ]  # fmt: skip
    for row in found["rows"]:
        assert set(row) == {
            "mode", "concurrency", "tokens_per_s", "step_ms", "outside_forward",
            "outside_kernels", "of_torch", "of_bare",
        }  # fmt: skip
        assert 0 < row["outside_forward"] < 1
        assert 0 < row["outside_kernels"] < 1
        assert row["of_torch"] > 0
        assert row["of_bare"] > 0
        assert (row["of_bare"] == row["of_torch"]) == (found["products"] == "plain")
    assert {part["operator"] for part in found["left"]["dual 2"]} > {"host", "aten::empty"}
    assert found["batching"]["continuous"] > 0
    assert [row["plan_policy"] for row in found["plan_policies"]] == [
        "blockserve", "sangam", "static"
    ]  # fmt: skip
    assert result.stderr.splitlines() == [
        "none, 1 at a time", "none, 2 at a time", "dual, 1 at a time", "dual, 2 at a time",
        "continuous and static batches", "plan policies",
    ]  # fmt: skip


def test_the_profiler_of_torch_is_not_heard() -> None:
    """In a process of its own: how loud it is, it decides once."""
    code = "from dilaserve_bench.command import bench; bench()"
    options = ["--modes", "none", "--concurrency", "1", "--passes", "1", "--rounds", "1"]
    found = subprocess.run(
        [sys.executable, "-c", code, "engine", "--model", TINY, *options, "--mixed", ""],
        env={name: value for name, value in os.environ.items() if "KINETO" not in name},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr.splitlines() == ["none, 1 at a time"]


def test_plain_products_are_named_and_the_table_has_both_ratios() -> None:
    options = ["--modes", "dual", "--concurrency", "2", "--passes", "2", "--rounds", "1"]
    options += ["--output", "32", "--mixed", "", "--pack-weights", "off"]
    result = CliRunner().invoke(bench, ["engine", "--model", str(TINY), *options])
    assert result.exit_code == 0, result.output
    head, row, words, *_ = result.stdout.splitlines()
    assert head.split()[-4:] == ["of", "bare", "of", "torch"]
    assert row.split()[-1] == row.split()[-2]
    assert "here with plain matrices" in words


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--threads", "100000", "should be less than or equal to 256"),
        (
            "--modes",
            "dual,triple",
            "--modes 'dual,triple': 'triple' is not none or prefix or dual; several are separated",
        ),
        ("--concurrency", "4,0", "'4,0': '0' is not a whole number of at least 1"),
        ("--mixed", "32,x", "--mixed '32,x': 'x' is not a whole number of at least 1"),
        (
            "--plan-policies",
            "fifo",
            "--plan-policies 'fifo': 'fifo' is not blockserve or sangam or static",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(
    option: str, value: str, words: str
) -> None:
    result = CliRunner().invoke(bench, ["engine", "--model", "/nowhere", option, value])
    assert result.exit_code == 2
    assert words in result.output


def test_every_part_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = StringIO()
    terminal = Console(file=drawn, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr(command, "Console", lambda stderr: terminal)
    options = ["--modes", "none,dual", "--concurrency", "1", "--passes", "1", "--rounds", "2"]
    options += ["--output", "32", "--mixed", "32", "--requests", "1"]
    result = CliRunner().invoke(bench, ["engine", "--model", str(TINY), *options])
    assert result.exit_code == 0, result.output
    n_parts = 2 * (2 + 2) + 2 * (4 + 3)
    assert f"{n_parts}/{n_parts}" in drawn.getvalue()
    assert "plan policies" in drawn.getvalue()
