"""Records runs of the tiny model's problems, from which its step predictor is trained.

    python -m dilaserve_bench.tiny.record --model models/tiny --problems 60 --seed 77 --out FILE

Every problem is denoised at each threshold, and a few times more at thresholds that change on the
way: at random up to some step, and not any more from there on. Runs that FILE has stay as they are.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerFast

from dilaserve.messages import CacheMode
from dilaserve.recording import RecordedStep, StepWriter, complete_runs
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.tiny.evaluate import Case, held_out_cases
from dilaserve_bench.tiny.layout import BLOCK_LENGTH
from dilaserve_bench.tiny.tasks import TASKS
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

__all__ = ["THRESHOLDS", "PlannedRun", "plan_runs", "record"]

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
N_SWITCHING = 3
"""Runs of a problem at thresholds that change."""
LAST_SWITCH = 8
"""Step up to which they may."""
MAX_BATCH_TOKENS = 8192
AT_ONCE = 96
"""Runs in one engine; between two of these groups, what there is is on disk."""
WITHOUT_END = 2**31


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One problem and the thresholds of its steps."""

    run_id: str
    prompt_id: str
    case: Case
    thresholds: tuple[float, ...]
    """Of the first steps; the last of them is kept to the end."""

    def threshold(self, step: int) -> float:
        """Of a step, from 1."""
        return self.thresholds[min(step, len(self.thresholds)) - 1]


def plan_runs(
    cases: Sequence[Case], seed: int, *, n_switching: int = N_SWITCHING
) -> list[PlannedRun]:
    """The runs of `cases`, which are those of `seed`; the same at every time."""
    runs = []
    for index, case in enumerate(cases):
        prompt_id = f"{case.problem.task}-{seed}-{index}"
        fixed = [(f"{threshold:g}", (threshold,)) for threshold in THRESHOLDS]
        rng = random.Random(prompt_id)
        switching = [(f"switch-{n}", _switching(rng)) for n in range(n_switching)]
        runs += [
            PlannedRun(f"{prompt_id}/{name}", prompt_id, case, thresholds)
            for name, thresholds in [*fixed, *switching]
        ]
    return runs


def record(
    model: Model, model_id: str, runs: Sequence[PlannedRun], *, cache: CacheMode = "dual"
) -> Iterator[list[RecordedStep]]:
    """The steps of each run, in no particular order of the runs."""
    for start in range(0, len(runs), AT_ONCE):
        yield from _record_group(model, model_id, runs[start : start + AT_ONCE], cache)


def _record_group(
    model: Model, model_id: str, runs: Sequence[PlannedRun], cache: CacheMode
) -> Iterator[list[RecordedStep]]:
    n_tokens = sum(len(r.case.prompt) + len(r.case.problem.answer) + BLOCK_LENGTH for r in runs)
    engine = Engine(
        model, cache_mode=cache, n_kv_tokens=n_tokens, max_batch_tokens=MAX_BATCH_TOKENS
    )
    by_id = {run.run_id: run for run in runs}
    steps: dict[str, list[RecordedStep]] = {run.run_id: [] for run in runs}
    for run in runs:
        engine.add(_request(run))
    while (output := engine.step()) is not None:
        for step in output.steps:
            run = by_id[step.request_id]
            steps[run.run_id].append(_recorded(model_id, run, step, 1000 * output.latency_s))
            engine.set_credit(run.run_id, Credit(run.threshold(step.step + 1), WITHOUT_END))
    yield from steps.values()


def _switching(rng: random.Random) -> tuple[float, ...]:
    return tuple(rng.choice(THRESHOLDS) for _ in range(rng.randint(2, LAST_SWITCH)))


def _request(run: PlannedRun) -> EngineRequest:
    n_output = len(run.case.problem.answer)
    return EngineRequest(
        request_id=run.run_id,
        prompt=run.case.prompt,
        spec=DecodingSpec(n_output=n_output, block_length=BLOCK_LENGTH, seed=0),
        step=0,
        canvas=[MASKED] * n_output,
        credit=Credit(run.threshold(1), WITHOUT_END),
    )


def _recorded(model_id: str, run: PlannedRun, step: StepOutput, latency_ms: float) -> RecordedStep:
    return RecordedStep(
        model_id=model_id,
        prompt_id=run.prompt_id,
        run_id=run.run_id,
        n_output=len(run.case.problem.answer),
        block_length=BLOCK_LENGTH,
        step=step.step,
        kind=step.kind,
        block=step.block,
        n_unmasked=step.n_unmasked,
        n_block_masked=step.n_block_masked,
        threshold=step.threshold,
        confidence=step.stats,
        latency_ms=latency_ms,
        finish_reason=step.finish_reason,
    )


def main() -> None:
    """Command line."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    cases = held_out_cases(tokenizer, list(TASKS), args.problems, args.seed)
    done = complete_runs(args.out)
    wanted = [run for run in plan_runs(cases, args.seed) if run.run_id not in done]
    recorded = record(load_model(args.model), args.model.resolve().name, wanted)
    with StepWriter(args.out) as writer:
        for steps in track(recorded, total=len(wanted), console=Console(file=sys.stderr)):
            writer.write(steps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=60, help="of each task")
    parser.add_argument("--seed", type=int, default=77, help="of the problems")
    parser.add_argument("--out", type=Path, required=True, help="file of recorded steps")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
