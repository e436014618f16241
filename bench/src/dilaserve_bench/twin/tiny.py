"""The tiny model's problems as a workload, and what its answers are worth. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerFast

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED
from dilaserve_bench.tiny.evaluate import Case, held_out_cases
from dilaserve_bench.tiny.tasks import TASKS
from dilaserve_bench.twin.clients import Judge
from dilaserve_bench.twin.model import ModelSource
from dilaserve_bench.twin.workload import Arrival, Workload, Workloads
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

__all__ = ["TinyProblems", "load_problems"]


class TinyProblems:
    """Held-out problems with their prompts, and the model that is to solve them."""

    def __init__(
        self, model: Model, tokenizer: PreTrainedTokenizerFast, cases: Sequence[Case]
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.cases = cases

    def sized(self, workloads: Workloads, *, n_prompt: int | None = None) -> Workloads:
        """The same arrivals with the sizes of their problems. `n_prompt`: priced as if every
        prompt had that length."""

        def draw(seed: int) -> Workload:
            return [self._sized(arrival, n_prompt) for arrival in workloads(seed)]

        return draw

    def source(self, cache_mode: CacheMode) -> Callable[[Workload], ModelSource]:
        """A step source for each run."""

        def build(workload: Workload) -> ModelSource:
            cases = {arrival.request_id: self.cases[arrival.case] for arrival in workload}
            return ModelSource(
                self._model, lambda request_id: cases[request_id].prompt, cache_mode=cache_mode
            )

        return build

    def judge(self) -> Judge:
        """Checks answers by the rules of their task."""

        def is_right(arrival: Arrival, canvas: list[int]) -> bool:
            problem = self.cases[arrival.case].problem
            tokens = [token for token in canvas if token != MASKED]
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
            return TASKS[problem.task].check(problem, text)

        return is_right

    def _sized(self, arrival: Arrival, n_prompt: int | None) -> Arrival:
        case = self.cases[arrival.case]
        return msgspec.structs.replace(
            arrival,
            n_prompt=n_prompt or len(case.prompt),
            n_output=len(case.problem.answer),
        )


def load_problems(folder: Path, *, n_per_task: int, seed: int, threads: int = 1) -> TinyProblems:
    """The model of a folder, and `n_per_task` held-out problems of each of its tasks. Raises
    ModelFolderError. Torch is told to use `threads` threads: more than one pay off only where
    nobody else wants the cores."""
    torch.set_num_threads(threads)
    model = load_model(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return TinyProblems(model, tokenizer, held_out_cases(tokenizer, list(TASKS), n_per_task, seed))
