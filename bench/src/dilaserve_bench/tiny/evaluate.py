"""Accuracy and mean steps of the tiny model on held-out problems, with the serving engine.

    python -m dilaserve_bench.tiny.evaluate --model models/tiny --problems 102
    python -m dilaserve_bench.tiny.evaluate --model models/tiny --thresholds 0.9 --json

Prompts go through the model folder's chat template; knows neither training nor service.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.tiny.layout import BLOCK_LENGTH
from dilaserve_bench.tiny.tasks import TASKS, Problem, held_out_problem
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

OUTPUT_LENGTHS = (32, 64, 96)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
ONE_TOKEN = 1.0
"""No confidence exceeds it, so that every step unmasks the single most confident token."""
MAX_BATCH_TOKENS = 8192
SEED = 2026

ThresholdOf = Callable[[int, int], float]
"""The threshold of a case, by index, at a step, from 1."""


@dataclass(frozen=True, slots=True)
class Result:
    """Problems of one task, output length, cache mode and threshold, summed up."""

    task: str
    output_length: int
    cache: CacheMode
    threshold: float
    n_problems: int
    n_right: int
    n_steps: int


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out problem with its prompt's token ids."""

    problem: Problem
    prompt: list[int]


def held_out_cases(
    tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str], n_per_task: int, seed: int
) -> list[Case]:
    """`n_per_task` problems of each task, their output lengths in turn."""
    problems = [
        held_out_problem(task, OUTPUT_LENGTHS[i % len(OUTPUT_LENGTHS)], seed, i)
        for task in tasks
        for i in range(n_per_task)
    ]
    return [Case(problem, prompt_ids(tokenizer, problem.prompt)) for problem in problems]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """A user's message through the chat template, as the gateway renders it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def measure(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    cases: Sequence[Case],
    cache: CacheMode,
    threshold: float,
) -> list[Result]:
    """Denoises all cases in one engine; a result per task and output length."""
    solved = solve(model, tokenizer, cases, cache, lambda _case, _step: threshold)
    groups: dict[tuple[str, int], list[tuple[bool, int]]] = {}
    for case, answer in zip(cases, solved, strict=True):
        groups.setdefault((case.problem.task, len(case.problem.answer)), []).append(answer)
    return [
        Result(
            task, length, cache, threshold, len(group),
            sum(right for right, _ in group), sum(n_steps for _, n_steps in group),
        )
        for (task, length), group in groups.items()
    ]  # fmt: skip


def solve(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    cases: Sequence[Case],
    cache: CacheMode,
    threshold_of: ThresholdOf,
) -> list[tuple[bool, int]]:
    """Whether the answer is right, and the number of steps, of every case."""
    return [
        (_is_right(tokenizer, case.problem, tokens), n_steps)
        for case, (tokens, n_steps) in zip(
            cases, denoise(model, cases, cache, threshold_of), strict=True
        )
    ]


def _is_right(tokenizer: PreTrainedTokenizerFast, problem: Problem, tokens: list[int]) -> bool:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    return TASKS[problem.task].check(problem, text)


def denoise(
    model: Model, cases: Sequence[Case], cache: CacheMode, threshold_of: ThresholdOf
) -> list[tuple[list[int], int]]:
    """Output tokens and number of steps of every case."""
    n_tokens = sum(len(case.prompt) + len(case.problem.answer) + BLOCK_LENGTH for case in cases)
    engine = Engine(
        model, cache_mode=cache, n_kv_tokens=n_tokens, max_batch_tokens=MAX_BATCH_TOKENS
    )
    for index, case in enumerate(cases):
        engine.add(_request(str(index), case, threshold_of(index, 1)))
    while (output := engine.step()) is not None:
        for step in output.steps:
            index = int(step.request_id)
            engine.set_credit(
                step.request_id, _credit(cases[index], threshold_of(index, step.step + 1))
            )
    return [
        ([token for token in engine.canvas(str(i)) if token != MASKED], engine.step_of(str(i)))
        for i in range(len(cases))
    ]


def _request(request_id: str, case: Case, threshold: float) -> EngineRequest:
    n_output = len(case.problem.answer)
    return EngineRequest(
        request_id=request_id,
        prompt=case.prompt,
        spec=DecodingSpec(n_output=n_output, block_length=BLOCK_LENGTH, seed=0),
        step=0,
        canvas=[MASKED] * n_output,
        credit=_credit(case, threshold),
    )


def _credit(case: Case, threshold: float) -> Credit:
    return Credit(threshold, until_block=len(case.problem.answer) // BLOCK_LENGTH)


def merge(results: Sequence[Result], label: str) -> Result:
    """Several results as one, under `label`; every problem counts the same."""
    first = results[0]
    return Result(
        label, 0, first.cache, first.threshold, sum(r.n_problems for r in results),
        sum(r.n_right for r in results), sum(r.n_steps for r in results),
    )  # fmt: skip


def wilson_interval(n_right: int, n_problems: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = n_right / n_problems
    centre = share + z * z / (2 * n_problems)
    spread = z * math.sqrt(share * (1 - share) / n_problems + z * z / (4 * n_problems * n_problems))
    scale = 1 + z * z / n_problems
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def markdown(results: Sequence[Result]) -> str:
    """One table per cache mode, by task and by output length: accuracy % · mean steps."""
    tables = []
    for cache in dict.fromkeys(r.cache for r in results):
        of_cache = [r for r in results if r.cache == cache]
        lines = [f"Cache `{cache}`:", "", *_table(of_cache)]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _table(results: Sequence[Result]) -> list[str]:
    tasks = list(dict.fromkeys(r.task for r in results))
    lengths = sorted({r.output_length for r in results})
    columns = ["all (95 % interval)", *tasks, *(f"{length} tokens" for length in lengths)]
    lines = ["| threshold | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for threshold in dict.fromkeys(r.threshold for r in results):
        row = [r for r in results if r.threshold == threshold]
        parts = [[r for r in row if r.task == task] for task in tasks]
        parts += [[r for r in row if r.output_length == length] for length in lengths]
        cells = [_overall_cell(merge(row, "all")), *(_cell(merge(part, "")) for part in parts)]
        name = "one token a step" if threshold == ONE_TOKEN else f"{threshold:g}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(result: Result) -> str:
    accuracy = 100 * result.n_right / result.n_problems
    return f"{accuracy:.1f} · {result.n_steps / result.n_problems:.1f}"


def _overall_cell(result: Result) -> str:
    low, high = wilson_interval(result.n_right, result.n_problems)
    return f"{_cell(result)} ({100 * low:.1f}-{100 * high:.1f})"


def main() -> None:
    """Command line."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    model = load_model(args.model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    cases = held_out_cases(tokenizer, args.tasks.split(","), args.problems, args.seed)
    results: list[Result] = []
    for cache in args.caches.split(","):
        for threshold in args.thresholds:
            results += measure(model, tokenizer, cases, cache, threshold)
            print(f"{cache} {threshold:g} done", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"seed": args.seed, "results": [asdict(r) for r in results]}, indent=1))
    else:
        print(markdown(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=102, help="per task and threshold")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[*THRESHOLDS, ONE_TOKEN],
        help="1 is one token a step",
    )  # fmt: skip
    parser.add_argument("--caches", default="none,dual", help="of none, prefix and dual")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
