"""Re-denoising a request alone under the thresholds that its steps were recorded with.

The text depends on the thresholds, which followed deadlines; given them it must come out the same
on any worker, in any batch, through any number of moves. Knows no store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dilaserve.messages import StepKind
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.alone import REQUEST_ID, WITHOUT_END, fresh_request
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One stream entry. After a gap it may hold positions of the lost steps before it too."""

    step: int
    threshold: float
    kind: StepKind
    positions: list[int]
    tokens: list[int]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step at which recording and replay part; `replayed` None: it had ended before."""

    step: int
    recorded: RecordedStep
    replayed: RecordedStep | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the replay of a request found."""

    n_steps: int
    """Last recorded step."""
    n_verified: int
    """Steps that came out the same, by kind, positions and tokens."""
    unverifiable: list[tuple[int, int]]
    """Spans (first, last step) recorded as one entry after the store had lost steps: not verifiable
    step by step; the replay goes on from the recorded canvas behind them."""
    difference: Difference | None
    is_text_equal: bool
    """Whether the recorded and the replayed canvas are the same after the last step."""
    canvas: list[int]
    """The replayed canvas, MASKED where masked."""

    @property
    def agrees(self) -> bool:
        """Nothing that could be compared differs."""
        return self.difference is None and self.is_text_equal


def reproduce(
    new_engine: Callable[[], Engine],
    prompt: list[int],
    spec: DecodingSpec,
    steps: Sequence[RecordedStep],
    canvas: Sequence[int],
) -> ReplayReport:
    """Denoise `prompt` again, one step per entry of `steps` (ascending) at that entry's threshold,
    and compare with the entries and, at the end, with the stored `canvas` (MASKED where masked).
    Stops at the first difference."""
    engine = new_engine()
    engine.add(fresh_request(prompt, spec, Credit(0.0, WITHOUT_END, until_step=0)))
    recorded_canvas = [MASKED] * spec.n_output
    unverifiable: list[tuple[int, int]] = []
    n_verified, difference = 0, None
    for recorded in steps:
        for position, token in zip(recorded.positions, recorded.tokens, strict=True):
            recorded_canvas[position] = token
        first = engine.step_of(REQUEST_ID) + 1
        if recorded.step > first:
            unverifiable.append((first, recorded.step))
            _jump(engine, prompt, spec, recorded.step, recorded_canvas)
            continue
        difference = _compare(recorded, _next_step(engine, recorded))
        if difference is not None:
            break
        n_verified += 1
    return ReplayReport(
        n_steps=steps[-1].step if steps else 0,
        n_verified=n_verified,
        unverifiable=unverifiable,
        difference=difference,
        is_text_equal=engine.canvas(REQUEST_ID) == list(canvas),
        canvas=engine.canvas(REQUEST_ID),
    )


def _next_step(engine: Engine, recorded: RecordedStep) -> StepOutput | None:
    """Run one step at the recorded threshold, after a rebuild where one is due."""
    engine.set_credit(REQUEST_ID, Credit(recorded.threshold, WITHOUT_END, recorded.step))
    while (output := engine.step()) is not None:
        if output.steps:
            return output.steps[0]
    return None


def _compare(recorded: RecordedStep, output: StepOutput | None) -> Difference | None:
    replayed = (
        None if output is None else msgspec.convert(output, RecordedStep, from_attributes=True)
    )
    if replayed is not None and _by_position(recorded) == _by_position(replayed):
        return None
    return Difference(step=recorded.step, recorded=recorded, replayed=replayed)


def _by_position(step: RecordedStep) -> tuple[StepKind, list[tuple[int, int]]]:
    return step.kind, sorted(zip(step.positions, step.tokens, strict=True))


def _jump(
    engine: Engine, prompt: list[int], spec: DecodingSpec, step: int, canvas: list[int]
) -> None:
    """Put the request where its recording says that it was after `step`."""
    engine.remove(REQUEST_ID)
    credit = Credit(0.0, WITHOUT_END, until_step=step)
    engine.add(EngineRequest(REQUEST_ID, prompt, spec, step, list(canvas), credit))
