from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.alone import engine_for_one, fresh_request
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.replay import RecordedStep, ReplayReport, reproduce

PROMPT = [4, 8, 15, 16, 23, 42]
SPEC = DecodingSpec(n_output=36, block_length=8, seed=99, temperature=1.0, ignore_eos=True)
THRESHOLDS = (0.9, 0.5, 0.7, 0.3, 0.95)


def record(model: Model, cache_mode: CacheMode = "dual") -> list[RecordedStep]:
    """A request among others, under a threshold that changes with every step."""
    engine = Engine(model, cache_mode=cache_mode, n_kv_tokens=4096, max_batch_tokens=4096)
    for index in range(3):
        mate = fresh_request([index] * (9 + index), SPEC, Credit(0.8, 99))
        engine.add(replace(mate, request_id=f"mate-{index}"))
    engine.add(fresh_request(PROMPT, SPEC, Credit(THRESHOLDS[0], 99)))
    steps = []
    while (output := engine.step()) is not None:
        for step in output.steps:
            if step.request_id == "alone":
                steps.append(msgspec.convert(step, RecordedStep, from_attributes=True))
                threshold = THRESHOLDS[step.step % len(THRESHOLDS)]
                engine.set_credit("alone", Credit(threshold, 99))
    assert len(steps) > 8
    assert {step.threshold for step in steps} == set(THRESHOLDS)
    return steps


def canvas_of(steps: list[RecordedStep]) -> list[int]:
    canvas = [MASKED] * SPEC.n_output
    for step in steps:
        for position, token in zip(step.positions, step.tokens, strict=True):
            canvas[position] = token
    return canvas


def replay(
    model: Model,
    steps: list[RecordedStep],
    cache_mode: CacheMode = "dual",
    canvas: list[int] | None = None,
) -> ReplayReport:
    n_tokens = len(PROMPT) + SPEC.n_output
    return reproduce(
        lambda: engine_for_one(model, cache_mode=cache_mode, n_tokens=n_tokens),
        PROMPT,
        SPEC,
        steps,
        canvas_of(steps) if canvas is None else canvas,
    )


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_a_recording_agrees_with_its_replay(model: Model, cache_mode: CacheMode) -> None:
    steps = record(model, cache_mode)
    report = replay(model, steps, cache_mode)
    assert report.agrees
    assert (report.n_verified, report.n_steps) == (len(steps), len(steps))
    assert report.canvas == canvas_of(steps)
    assert report.unverifiable == []


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_a_recording_of_dream_agrees_with_its_replay(
    random_dream: Model, cache_mode: CacheMode
) -> None:
    steps = record(random_dream, cache_mode)
    report = replay(random_dream, steps, cache_mode)
    assert report.agrees
    assert report.n_verified == len(steps)


def test_a_request_that_is_not_done_agrees_too(model: Model) -> None:
    report = replay(model, record(model)[:4])
    assert report.agrees
    assert MASKED in report.canvas


def test_no_steps_no_difference(model: Model) -> None:
    assert replay(model, []).agrees


def test_the_first_difference_is_told(model: Model) -> None:
    steps = record(model)
    wrong = msgspec.structs.replace(steps[5], tokens=[t ^ 1 for t in steps[5].tokens])
    report = replay(model, [*steps[:5], wrong, *steps[6:]])
    assert not report.agrees
    assert report.n_verified == 5
    assert report.difference is not None
    assert report.difference.step == 6
    assert report.difference.recorded == wrong
    assert report.difference.replayed == steps[5]


def test_another_threshold_is_a_difference(model: Model) -> None:
    steps = record(model)
    at = next(i for i, s in enumerate(steps) if s.threshold == 0.95 and len(s.positions) == 1)
    report = replay(
        model, [*steps[:at], msgspec.structs.replace(steps[at], threshold=0.0), *steps[at + 1 :]]
    )
    assert report.difference is not None
    assert report.difference.step == at + 1


def test_another_cache_mode_is_a_difference(model: Model) -> None:
    report = replay(model, record(model, "dual"), "none")
    assert report.difference is not None
    assert report.difference.recorded.kind == "cache"


def test_a_step_after_the_end_is_a_difference(model: Model) -> None:
    steps = record(model)
    extra = RecordedStep(
        step=len(steps) + 1, threshold=0.9, kind="cache", positions=[0], tokens=[1]
    )
    report = replay(model, [*steps, extra])
    assert report.difference is not None
    assert report.difference.replayed is None


def test_a_stored_canvas_that_its_entries_do_not_make_is_a_difference(model: Model) -> None:
    steps = record(model)
    canvas = canvas_of(steps)
    canvas[7] ^= 1
    report = replay(model, steps, canvas=canvas)
    assert report.difference is None
    assert not report.is_text_equal
    assert not report.agrees


def test_a_span_of_lost_steps_is_told_and_the_rest_verified(model: Model) -> None:
    steps = record(model)
    for first in range(len(steps) - 2):
        lost = steps[first : first + 3]
        assert all(b.step == a.step + 1 for a, b in pairwise(lost))
        merged = msgspec.structs.replace(
            lost[-1],
            positions=[p for step in lost for p in step.positions],
            tokens=[t for step in lost for t in step.tokens],
        )
        report = replay(model, [*steps[:first], merged, *steps[first + 3 :]])
        assert report.agrees
        assert report.unverifiable == [(first + 1, first + 3)]
        assert report.n_verified == len(steps) - 3
        assert report.canvas == canvas_of(steps)
