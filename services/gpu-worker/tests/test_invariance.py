"""Whatever shares its batches, a request gets just what it gets alone: tokens, confidences and
their statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilaserve.messages import CacheMode, ConfidenceStats
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.alone import engine_for_one
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

FAR = 10**6
MakeFolder = Callable[..., Path]
Course = list[tuple[int, str, list[int], list[int], list[float], ConfidenceStats]]


@dataclass(frozen=True)
class Arrival:
    """A request and the pass before which it joins."""

    request: EngineRequest
    joins_at: int
    leaves_at: int | None
    """Pass before which it is taken out; it comes back, as after a move, two passes later."""


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    n_requests = draw(st.integers(1, 7))
    return [
        Arrival(
            draw(requests(f"r{index}")),
            draw(st.integers(0, 6)),
            draw(st.none() | st.integers(1, 12)),
        )
        for index in range(n_requests)
    ]


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> EngineRequest:
    n_output = draw(st.integers(1, 40))
    spec = DecodingSpec(
        n_output=n_output,
        block_length=draw(st.sampled_from([4, 8, 16, 32])),
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0, 0.7])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        ignore_eos=draw(st.booleans()),
    )
    return EngineRequest(
        request_id=request_id,
        prompt=draw(st.lists(st.integers(0, 58), max_size=70)),
        spec=spec,
        step=0,
        canvas=[MASKED] * n_output,
        credit=Credit(draw(st.sampled_from([0.3, 0.6, 0.9])), FAR),
        quota=draw(st.sampled_from([None, None, 1, 3])),
    )


@pytest.fixture(scope="session")
def odd_model(make_folder: MakeFolder) -> Model:
    """Six query heads of width 6 over three: no head, and no token, fills whole vectors."""
    return load_model(make_folder(d_model=36, n_heads=6, n_kv_heads=3))


@pytest.mark.parametrize("family", ["llada", "dream", "odd"])
@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=arrivals(),
    max_batch_tokens=st.sampled_from([128, 300, 10_000]),
    n_kv_tokens=st.sampled_from([128, 512, 4096]),
)
def test_any_mix_gives_each_what_it_gets_alone(
    cache_mode: CacheMode,
    arrivals: list[Arrival],
    max_batch_tokens: int,
    n_kv_tokens: int,
    family: str,
    model: Model,
    random_dream: Model,
    odd_model: Model,
) -> None:
    model = {"llada": model, "dream": random_dream, "odd": odd_model}[family]
    engine = Engine(
        model,
        cache_mode=cache_mode,
        n_kv_tokens=n_kv_tokens,
        max_batch_tokens=max_batch_tokens,
    )
    together = _run_together(engine, arrivals)
    for arrival in arrivals:
        alone = _run_alone(model, cache_mode, arrival.request)
        assert together[arrival.request.request_id] == alone
    for arrival in arrivals:
        engine.remove(arrival.request.request_id)
    assert engine.n_free_kv_tokens == (0 if cache_mode == "none" else n_kv_tokens)


def test_grouped_query_heads_are_invariant_too(grouped_model: Model) -> None:
    mates = [
        Arrival(_plain(f"r{n}", prompt=list(range(n)), n_output=20 + n), n % 3, None)
        for n in range(1, 9)
    ]
    engine = Engine(grouped_model, cache_mode="dual", n_kv_tokens=4096, max_batch_tokens=4096)
    together = _run_together(engine, mates)
    for mate in mates:
        assert together[mate.request.request_id] == _run_alone(grouped_model, "dual", mate.request)


def _plain(request_id: str, *, prompt: list[int], n_output: int) -> EngineRequest:
    spec = DecodingSpec(n_output=n_output, block_length=8, seed=1, ignore_eos=True)
    canvas = [MASKED] * n_output
    return EngineRequest(request_id, prompt, spec, 0, canvas, Credit(0.6, FAR))


def _run_together(engine: Engine, arrivals: list[Arrival]) -> dict[str, Course]:
    """Run all to the end, joining and leaving as they say."""
    courses: dict[str, Course] = {arrival.request.request_id: [] for arrival in arrivals}
    comings = {(a.joins_at, a.request.request_id): a.request for a in arrivals}
    leaves = {a.request.request_id: a.leaves_at for a in arrivals}
    n_passes = 0
    while comings or engine.has_work():
        for key in [key for key in comings if key[0] <= n_passes]:
            engine.add(comings.pop(key))
        for arrival in arrivals:
            request_id = arrival.request.request_id
            if leaves[request_id] == n_passes and engine.holds(request_id):
                comings[n_passes + 2, request_id] = replace(
                    arrival.request,
                    step=engine.step_of(request_id),
                    canvas=engine.canvas(request_id),
                    confidences=_confidences(courses[request_id], arrival.request.spec.n_output),
                )
                engine.remove(request_id)
        _spoil_free_pages(engine)
        output = engine.step()
        for step in output.steps if output else []:
            courses[step.request_id].append(_trace(step))
        n_passes += 1
    return courses


def _spoil_free_pages(engine: Engine) -> None:
    """Whoever reads a key that he has not written himself shows it."""
    if (pool := engine._runner._pool) is None:
        return
    owned = [page for sequence in engine._sequences.values() for page in sequence.pages]
    for tensor_SGA in pool.layer(0) + pool.layer(1):
        pages_PSGA = tensor_SGA.unflatten(0, (-1, PAGE_TOKENS))
        is_free = torch.ones(len(pages_PSGA), dtype=torch.bool)
        is_free[owned] = False
        pages_PSGA[is_free] = torch.nan


def _confidences(course: Course, n_output: int) -> list[float]:
    """What a store knows of the tokens that are committed."""
    known = {p: c for step in course for p, c in zip(step[2], step[4], strict=True)}
    return [known.get(position, 0.0) for position in range(n_output)]


def _run_alone(model: Model, cache_mode: CacheMode, request: EngineRequest) -> Course:
    n_tokens = len(request.prompt) + request.spec.n_output
    engine = engine_for_one(model, cache_mode=cache_mode, n_tokens=n_tokens)
    engine.add(request)
    course = []
    while (output := engine.step()) is not None:
        course += [_trace(step) for step in output.steps]
    return course


def _trace(step: StepOutput) -> tuple[int, str, list[int], list[int], list[float], ConfidenceStats]:
    return step.step, step.kind, step.positions, step.tokens, step.confidences, step.stats
