"""The virtual engine plans what the worker's engine plans, pass by pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.twin.engine import VirtualEngine
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS as ENGINE_PAGE_TOKENS
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName, build_plan_policy
from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import (
    Credit,
    EngineRequest,
    NeverFitsError,
    StepOutput,
)
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.weights import load_model

BUNDLED = Path(__file__).parents[3] / "models" / "tiny"
BLOCK = 16
PLAN_POLICIES: tuple[PlanPolicyName, ...] = ("blockserve", "sangam", "static")


@pytest.fixture(scope="module")
def model() -> LLaDA:
    torch.set_num_threads(1)
    return load_model(BUNDLED)


class Echo:
    """A step source that repeats what the real engine did."""

    def __init__(self) -> None:
        self.outputs: dict[str, StepOutput] = {}

    def begin(self, request: EngineRequest) -> EchoCourse:
        return EchoCourse(self, request.request_id)


class EchoCourse:
    def __init__(self, echo: Echo, request_id: str) -> None:
        self.echo = echo
        self.request_id = request_id
        self.threshold = -1.0

    def plan(self, kind: RowKind, threshold: float) -> None:
        self.threshold = threshold

    def run(self) -> StepOutput | None:
        return self.echo.outputs.get(self.request_id)

    def committed(self) -> None: ...

    def end(self) -> None: ...


class Both:
    """A real and a virtual engine that are told the same."""

    def __init__(
        self,
        model: LLaDA,
        rng: random.Random,
        cache_mode: CacheMode,
        plan_policy: PlanPolicyName,
        plan_tokens: int = 64,
    ) -> None:
        self.rng = rng
        self.echo = Echo()
        self.real = Engine(
            model,
            cache_mode=cache_mode,
            n_kv_tokens=416,
            max_batch_tokens=150,
            plan_policy=build_plan_policy(plan_policy, n_tokens=plan_tokens),
        )
        self.virtual = VirtualEngine(
            self.echo,
            cache_mode=cache_mode,
            n_kv_tokens=416,
            max_batch_tokens=150,
            max_sequence_length=model.config.max_sequence_length,
            plan_policy=build_plan_policy(plan_policy, n_tokens=plan_tokens),
        )
        self.requests: dict[str, EngineRequest] = {}
        self.finished: set[str] = set()
        self.n_added = 0
        self.kinds: set[str] = set()
        self.n_left_out = 0

    def add_new(self) -> None:
        self.n_added += 1
        n_output = self.rng.choice([16, 24, 40, 48])
        prompt = [self.rng.randrange(4, 100) for _ in range(self.rng.randint(1, 130))]
        spec = DecodingSpec(
            n_output=n_output,
            block_length=BLOCK,
            seed=self.n_added,
            temperature=0.5,
            ignore_eos=self.rng.random() < 0.7,
        )
        request_id = f"r{self.n_added}"
        self._add(EngineRequest(request_id, prompt, spec, 0, [MASKED] * n_output, self.credit(0)))

    def credit(self, step: int) -> Credit:
        return Credit(
            threshold=self.rng.choice([0.1, 0.3, 0.9]),
            until_block=self.rng.randint(0, 3),
            until_step=self.rng.choice([None, step + self.rng.randint(0, 4)]),
        )

    def recredit(self) -> None:
        for request_id in self.requests:
            if self.rng.random() < 0.4:
                credit = self.credit(self.real.step_of(request_id))
                self.real.set_credit(request_id, credit)
                self.virtual.set_credit(request_id, credit)

    def limit(self) -> None:
        n_tokens = self.rng.choice([None, 0, 60, 120])
        self.real.limit_recomputes(n_tokens)
        self.virtual.limit_recomputes(n_tokens)

    def move(self) -> None:
        """Take a request away, and bring it again as it stands: with a cache, it is rebuilt."""
        request_id = self.rng.choice(list(self.requests))
        request = self.requests[request_id]
        if request_id in self.finished:  # the store would not give it to anybody
            return
        step, canvas = self.real.step_of(request_id), self.real.canvas(request_id)
        self.remove(request_id)
        credit = self.credit(step)
        self._add(EngineRequest(request_id, request.prompt, request.spec, step, canvas, credit))

    def remove(self, request_id: str) -> None:
        del self.requests[request_id]
        self.real.remove(request_id)
        self.virtual.remove(request_id)

    def run_pass(self) -> bool:
        """Compare one pass; False if there was none."""
        real, virtual = self.real.plan(), self.virtual.plan()
        assert (real is None) == (virtual is None)
        if real is None or virtual is None:
            return False
        assert sorted(
            (row.sequence.request_id, row.kind, len(row.tokens), row.threshold) for row in real.rows
        ) == sorted(
            (row.sequence.course.request_id, row.kind, row.n_tokens, row.sequence.course.threshold)
            for row in virtual.rows
        )
        assert virtual.n_tokens == real.n_tokens
        self.kinds |= {row.kind for row in real.rows}
        done = self.real.unmask(real, self.real.forward(real))
        self.echo.outputs = {step.request_id: step for step in done.steps}
        by_request = sorted(done.steps, key=lambda step: step.request_id)
        assert sorted(self.virtual.unmask(virtual), key=lambda s: s.request_id) == by_request
        assert self.virtual.n_free_kv_tokens == self.real.n_free_kv_tokens
        for step in done.steps:
            if step.finish_reason is not None:
                self.finished.add(step.request_id)
                if self.rng.random() < 0.8:
                    self.remove(step.request_id)
        return True

    def live(self, n_rounds: int) -> int:
        """Add, move, credit, limit and run at random; gives the number of passes."""
        n_passes = 0
        for _ in range(n_rounds):
            if len(self.requests) < 8 and self.rng.random() < 0.6:
                self.add_new()
            if self.requests and self.rng.random() < 0.3:
                self.move()
            self.recredit()
            if self.rng.random() < 0.3:
                self.limit()
            n_passes += self.run_pass()
        return n_passes

    def _add(self, request: EngineRequest) -> None:
        errors = [_error_of(engine, request) for engine in (self.real, self.virtual)]
        assert errors[0] == errors[1]
        if errors[0] is None:
            self.requests[request.request_id] = request
        else:
            self.n_left_out += 1


def _error_of(engine: Engine | VirtualEngine, request: EngineRequest) -> str | None:
    """What is said against adding it; None once it is added."""
    try:
        engine.add(request)
    except NeverFitsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan_policy", PLAN_POLICIES)
@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_same_rows_in_every_pass(
    model: LLaDA, cache_mode: CacheMode, plan_policy: PlanPolicyName
) -> None:
    n_passes, kinds, n_left_out = 0, set(), 0
    for seed in range(4):
        both = Both(model, random.Random(seed), cache_mode, plan_policy)
        n_passes += both.live(40)
        kinds |= both.kinds
        n_left_out += both.n_left_out
    assert n_passes > 80
    assert n_left_out > 0
    assert kinds == ({"recompute"} if cache_mode == "none" else {"recompute", "cache", "rebuild"})


@settings(max_examples=15, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["none", "prefix", "dual"]),
    st.sampled_from(PLAN_POLICIES),
    st.integers(1, 300),
)
def test_same_rows_under_any_plan_policy(
    model: LLaDA,
    rng: random.Random,
    cache_mode: CacheMode,
    plan_policy: PlanPolicyName,
    plan_tokens: int,
) -> None:
    Both(model, rng, cache_mode, plan_policy, plan_tokens).live(12)


def test_pages_are_those_of_the_engine() -> None:
    from dilaserve_bench.twin.engine import PAGE_TOKENS

    assert PAGE_TOKENS == ENGINE_PAGE_TOKENS
