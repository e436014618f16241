"""Records runs of the tiny model's problems, from which its step predictor is trained.

    python -m dilaserve_bench.tiny.record --model models/tiny --problems 60 --seed 77 --out FILE

What is recorded of a prompt, and how, is the business of `dilaserve record`; here are the problems.
Runs that FILE has stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerFast

from dilaserve.messages import CacheMode
from dilaserve.recording import RecordedStep, StepWriter, complete_runs
from dilaserve_bench.tiny.evaluate import Case, held_out_cases
from dilaserve_bench.tiny.layout import BLOCK_LENGTH
from dilaserve_bench.tiny.tasks import TASKS
from dilaserve_gpu_worker import recording
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.recording import THRESHOLDS, PlannedRun, Prompt, Recorder
from dilaserve_gpu_worker.weights import load_model

__all__ = ["THRESHOLDS", "PlannedRun", "plan_runs", "record"]


def plan_runs(cases: Sequence[Case], seed: int) -> list[PlannedRun]:
    """The runs of `cases`, which are those of `seed`; the same at every time."""
    prompts = [
        Prompt(
            prompt_id=f"{case.problem.task}-{seed}-{index}",
            prompt_ids=case.prompt,
            n_output=len(case.problem.answer),
        )
        for index, case in enumerate(cases)
    ]
    return recording.plan_runs(prompts, seed=seed)


def record(
    model: Model, model_id: str, runs: Sequence[PlannedRun], *, cache: CacheMode = "dual"
) -> Iterator[list[RecordedStep]]:
    """The steps of each run, in the order in which they end."""
    yield from Recorder(model, model_id, cache=cache, block_length=BLOCK_LENGTH).record(runs)


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
