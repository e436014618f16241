"""The model in the loop: same tokens as when each request is denoised alone, answers checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dilaserve.messages import CacheMode
from dilaserve.profiles import load_profiles
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.data import data_file
from dilaserve_bench.twin.clients import Judge
from dilaserve_bench.twin.faults import Fault
from dilaserve_bench.twin.model import ModelSource
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.simulation import Scenario
from dilaserve_bench.twin.tiny import TinyProblems, load_problems
from dilaserve_bench.twin.workload import Arrival, RequestClass, Workload, poisson
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.weights import load_model

from .helpers import infaas, run, spec

BUNDLED = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(scope="module")
def problems() -> TinyProblems:
    torch.set_num_threads(1)
    return load_problems(BUNDLED, n_per_task=2, seed=1)


@pytest.fixture(scope="module")
def model() -> LLaDA:
    return load_model(BUNDLED)


def in_the_loop(
    problems: TinyProblems,
    *,
    cache_mode: CacheMode = "dual",
    threshold: float = 0.9,
    faults: tuple[Fault, ...] = (),
    judge: Judge | None = None,
) -> Scenario:
    """Two instances, so slow that several requests share most passes."""
    return Scenario(
        cluster=spec("2xtp1", block_length=32, overhead=4.0, cache_mode=cache_mode),
        profiles=load_profiles(data_file("h100_llada.json")),
        policy=infaas(threshold),
        source=problems.source(cache_mode),
        judge=judge or problems.judge(),
        faults=faults,
        ignore_eos=False,
    )


def workload(problems: TinyProblems, *, n: int = 6, n_prompt: int | None = None) -> Workload:
    any_size = RequestClass(n_prompt=1, n_output=1, slo_s=9.5)
    draw = poisson([any_size], rate=100.0, n=n, n_cases=len(problems.cases))
    return problems.sized(draw, n_prompt=n_prompt)(0)


@pytest.mark.parametrize(
    ("cache_mode", "faults"),
    [
        ("dual", (Fault(at_s=0.2, action="kill", instance=0, for_s=0.2),)),
        ("prefix", (Fault(at_s=0.2, action="leave", instance=0, for_s=0.2),)),
        ("none", ()),
    ],
)
def test_tokens_are_those_of_the_engine_alone(
    problems: TinyProblems, model: LLaDA, cache_mode: CacheMode, faults: tuple[Fault, ...]
) -> None:
    answers: dict[str, list[int]] = {}

    def keep(arrival: Arrival, canvas: list[int]) -> bool:
        answers[arrival.request_id] = canvas
        return True

    arriving = workload(problems)
    done = run(in_the_loop(problems, cache_mode=cache_mode, faults=faults, judge=keep), arriving)
    assert {served.outcome for served in done.served} == {"done"}
    assert done.measured.n_rows > done.measured.n_passes, "some passes were shared"
    assert (done.measured.n_rebuilds > 0) == (bool(faults) and cache_mode != "none")
    n_forwards = 0
    for arrival in arriving:
        prompt = problems.cases[arrival.case].prompt
        decoding = DecodingSpec(n_output=arrival.n_output, block_length=32, seed=0)
        alone = denoise_alone(model, prompt, decoding, cache_mode=cache_mode, threshold=0.9)
        mask_id = model.config.mask_id
        canvas = [mask_id if token == MASKED else token for token in answers[arrival.request_id]]
        assert prompt + canvas == alone.sequence
        n_forwards += alone.nfe
    assert done.measured.n_steps == n_forwards


def test_answers_are_checked_by_the_rules_of_their_task(problems: TinyProblems) -> None:
    judge, arriving = problems.judge(), workload(problems)
    vocabulary = json.loads((BUNDLED / "tokenizer.json").read_text())["model"]["vocab"]
    problem = problems.cases[arriving[0].case].problem
    right = [vocabulary[character] for character in "".join(problem.answer)]
    assert judge(arriving[0], [*right, MASKED, MASKED])
    assert not judge(arriving[0], right[:-1])
    figures = report_run(run(in_the_loop(problems, judge=lambda a, _: a.at_s > 0.03), arriving))
    assert figures.accuracy == sum(a.at_s > 0.03 for a in arriving) / len(arriving)


def test_a_lower_threshold_takes_fewer_steps(problems: TinyProblems) -> None:
    high, low = (
        run(in_the_loop(problems, threshold=threshold), workload(problems, n=3)).measured.n_steps
        for threshold in (0.95, 0.3)
    )
    assert low < high


def test_prompts_can_be_priced_at_another_length(problems: TinyProblems) -> None:
    short = run(in_the_loop(problems), workload(problems, n=3))
    long = run(in_the_loop(problems), workload(problems, n=3, n_prompt=400))
    assert long.measured.n_steps == short.measured.n_steps
    assert long.measured.n_computed > short.measured.n_computed
    assert [s.right for s in long.served] == [s.right for s in short.served]


def test_planned_passes_are_computed_together_within_the_limit(model: LLaDA) -> None:
    requests = [
        EngineRequest(
            f"r{n}",
            [5] * 10,
            DecodingSpec(n_output=32, block_length=32, seed=0),
            0,
            [MASKED] * 32,
            Credit(0.9, 0),
        )
        for n in range(5)
    ]
    source = ModelSource(model, lambda _: [5] * 10, cache_mode="dual", max_batch_tokens=100)
    courses = [source.begin(request) for request in requests]
    for course in courses:
        course.plan("recompute", 0.9)
    courses[0].end()  # its instance died
    outputs = [course.run() for course in courses[1:]]
    assert [output.request_id for output in outputs if output is not None] == [
        "r1", "r2", "r3", "r4"
    ]  # fmt: skip
    assert len({tuple(output.tokens) for output in outputs if output is not None}) == 1


def test_a_pool_that_is_too_small_is_named(model: LLaDA) -> None:
    source = ModelSource(model, lambda _: [5] * 10, cache_mode="dual", n_kv_tokens=64)
    spec_ = DecodingSpec(n_output=32, block_length=32, seed=0)
    courses = [
        source.begin(EngineRequest(name, [5] * 10, spec_, 0, [MASKED] * 32, Credit(0.9, 0)))
        for name in ("a", "b")
    ]
    for course in courses:
        course.plan("recompute", 0.9)
    with pytest.raises(RuntimeError, match="n_kv_tokens"):
        courses[0].run()
