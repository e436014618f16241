"""Records runs of the tiny model's problems, from which its step predictor is trained.

    python -m dilaserve_bench.tiny.record --model models/tiny --problems 60 --seed 77 --out FILE

What is recorded of a prompt, and how, is the business of `dilaserve record`; here are the problems:
those whose answers fill their canvas, and with `--uneven` those that end before it, or behind it.
Runs that FILE has stay as they are.
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
from dilaserve_bench.tiny.evaluate import Case, held_out_cases, prompt_ids
from dilaserve_bench.tiny.layout import BLOCK_LENGTH
from dilaserve_bench.tiny.tasks import TASKS, held_out_problem
from dilaserve_gpu_worker import recording
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.recording import THRESHOLDS, PlannedRun, Prompt, Recorder
from dilaserve_gpu_worker.weights import load_model

__all__ = ["THRESHOLDS", "PlannedRun", "Uneven", "plan_runs", "plan_uneven", "record"]
__all__ += ["uneven_cases"]

CANVASES = (32, 48, 64, 96, 128)
N_CANVASES = 2
"""Of each problem whose answer does not fill them."""
SHORTEST, LONGEST = 2, 64
"""Of the answers of these problems, in tokens; those of sums are whole blocks."""
ENDS_PER_IGNORED = 3
"""Of so many such problems one is run with its end ignored, too: few requests ask for that, and to
the predictor the two look the same."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A problem to be solved on canvases that its answer does not fill."""

    case: Case
    index: int
    canvases: tuple[int, ...]


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


def uneven_cases(
    tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str], n_per_task: int, seed: int
) -> list[Uneven]:
    """`n_per_task` problems of each task, of random lengths, with random canvases for each."""
    return [_uneven(tokenizer, task, index, seed) for task in tasks for index in range(n_per_task)]


def plan_uneven(cases: Sequence[Uneven], seed: int, *, ignore_eos: bool) -> list[PlannedRun]:
    """The runs of `cases` on each of their canvases: a prompt has one id on all of them, whether
    its end is heeded or not, so that training does not part them."""
    prompts = [_prompt(each, n_output, seed) for each in cases for n_output in each.canvases]
    return recording.plan_runs(prompts, seed=seed, ignore_eos=ignore_eos)


def record(
    model: Model,
    model_id: str,
    runs: Sequence[PlannedRun],
    *,
    cache: CacheMode = "dual",
) -> Iterator[list[RecordedStep]]:
    """The steps of each run, in the order in which they end."""
    yield from Recorder(model, model_id, cache=cache, block_length=BLOCK_LENGTH).record(runs)


def main() -> None:
    """Command line."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    filled = held_out_cases(tokenizer, list(TASKS), args.problems, args.seed)
    uneven = uneven_cases(tokenizer, list(TASKS), args.uneven, args.seed)
    plan = plan_runs(filled, args.seed)
    plan += plan_uneven(uneven, args.seed, ignore_eos=False)
    plan += plan_uneven(uneven[::ENDS_PER_IGNORED], args.seed, ignore_eos=True)
    done = complete_runs(args.out)
    wanted = [run for run in plan if run.run_id not in done]
    with StepWriter(args.out) as writer:
        recorded = record(load_model(args.model), args.model.resolve().name, wanted)
        for steps in track(recorded, total=len(wanted), console=Console(file=sys.stderr)):
            writer.write(steps)


def _uneven(tokenizer: PreTrainedTokenizerFast, task: str, index: int, seed: int) -> Uneven:
    chance = random.Random(f"{seed}/{task}/{index}")
    length = 2 * chance.randint(SHORTEST // 2, LONGEST // 2)
    if task == "add":
        length = BLOCK_LENGTH * chance.randint(1, LONGEST // BLOCK_LENGTH)
    problem = held_out_problem(task, length, seed, index)
    canvases = chance.sample([n for n in CANVASES if n != length], N_CANVASES)
    return Uneven(Case(problem, prompt_ids(tokenizer, problem.prompt)), index, tuple(canvases))


def _prompt(each: Uneven, n_output: int, seed: int) -> Prompt:
    return Prompt(
        prompt_id=f"{each.case.problem.task}-{seed}-uneven-{each.index}",
        prompt_ids=each.case.prompt,
        n_output=n_output,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=60, help="of each task")
    parser.add_argument(
        "--uneven", type=int, default=0, help="of each task, with answers that do not fill them"
    )
    parser.add_argument("--seed", type=int, default=77, help="of the problems")
    parser.add_argument("--out", type=Path, required=True, help="file of recorded steps")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
