"""Made-up runs: each block of a prompt has an ease; the confidences tell of the blocks to come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dilaserve.messages import ConfidenceStats, StepItemResult, StepQuestion
from dilaserve.recording import RecordedStep
from dilaserve_predictor.features import state_after

THRESHOLDS = (0.5, 0.7, 0.9)
BLOCK = 32


def run_of(
    prompt: int, threshold_at: Callable[[int], float], *, n_output: int = 64, run_id: str = ""
) -> list[RecordedStep]:
    """Denoise at `threshold_at(step)`; the lower, the more tokens a step unmasks."""
    rng = random.Random(prompt)
    eases = [rng.uniform(0.1, 1.0) for _ in range(-(-n_output // BLOCK))]
    steps: list[RecordedStep] = []
    done = 0
    while done < n_output:
        number = len(steps) + 1
        threshold = threshold_at(number)
        block, end = done // BLOCK, min((done // BLOCK + 1) * BLOCK, n_output)
        done = min(done + 1 + round(12 * eases[block] * (1.1 - threshold)), end)
        ahead = sum(eases[done // BLOCK :]) / len(eases)
        steps.append(
            RecordedStep(
                model_id="made-up",
                prompt_id=f"prompt-{prompt}",
                run_id=run_id or f"{prompt}-{threshold_at(1)}",
                n_output=n_output,
                block_length=BLOCK,
                step=number,
                kind="cache" if steps and steps[-1].block == block else "recompute",
                block=block,
                n_unmasked=done,
                n_block_masked=end - done,
                threshold=threshold,
                confidence=confidence_of(ahead),
                latency_ms=5.0,
                finish_reason="length" if done == n_output else None,
            )
        )
    return steps


def confidence_of(ease: float) -> ConfidenceStats:
    return ConfidenceStats(
        min=0.1 * ease, q25=0.5 * ease, median=0.7 * ease, mean=0.6 * ease, q75=0.9 * ease
    )


def runs_of(n_prompts: int) -> list[list[RecordedStep]]:
    """Every prompt at every threshold, and once with a switch on the way."""
    runs = []
    for prompt in range(n_prompts):
        n_output = (32, 64, 80)[prompt % 3]
        runs += [
            run_of(prompt, lambda _, t=threshold: t, n_output=n_output) for threshold in THRESHOLDS
        ]
        low, high = random.Random(prompt).sample(THRESHOLDS, 2)
        runs.append(
            run_of(
                prompt,
                lambda step, low=low, high=high: low if step < 4 else high,
                n_output=n_output,
                run_id=f"{prompt}-switch",
            )
        )
    return runs


def question_of(run: Sequence[RecordedStep], step: int) -> StepQuestion:
    """About a run after so many steps."""
    return state_after(run[step - 1])


def item_of(step: RecordedStep, *, n_before: int = 0, **changes: object) -> StepItemResult:
    """What a worker reports of a step."""
    values: dict[str, object] = {
        "request_id": step.run_id,
        "epoch": 1,
        "step": step.step,
        "block": step.block,
        "kind": step.kind,
        "threshold": step.threshold,
        "outcome": "committed",
        "n_new": step.n_unmasked - n_before,
        "n_unmasked": step.n_unmasked,
        "n_block_masked": step.n_block_masked,
        "confidence": step.confidence,
        "finish_reason": step.finish_reason,
    }
    return StepItemResult(**(values | changes))  # type: ignore[arg-type]
