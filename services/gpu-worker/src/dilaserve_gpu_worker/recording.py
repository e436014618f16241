"""Denoising prompts under every threshold and writing down each step, for the step predictor, the
twin and the planner. Deterministic but for the milliseconds. Knows no tokenizer and no store.

Online, predictions are asked for in the middle of a run whose threshold changed on the way. So
some runs change it at random steps up to some step, and keep to one from there on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dilaserve.errors import InvalidRequestError
from dilaserve.messages import CacheMode, Count, TokenId
from dilaserve.recording import RecordedStep, prompt_digest
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.alone import check_length
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.models.model import Model

__all__ = ["LAST_SWITCH", "N_SWITCHING", "THRESHOLDS", "PlannedRun", "Prompt", "Recorder"]
__all__ += ["plan_runs", "read_prompts"]

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
N_SWITCHING = 3
"""Runs of a prompt whose threshold changes."""
LAST_SWITCH = 8
"""Step up to which it may."""
WITHOUT_END = 2**31


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt in token ids, and the length of its output. Training splits by `prompt_id`."""

    prompt_id: str
    prompt_ids: list[TokenId]
    n_output: Count


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One denoising of a prompt: the thresholds of its first steps; the last is kept to the end."""

    prompt: Prompt
    thresholds: tuple[float, ...]
    ignore_eos: bool = False

    @property
    def run_id(self) -> str:
        """What it does: the same for the same tokens, length, ending and thresholds only."""
        length = f"{self.prompt.n_output}{'-on' if self.ignore_eos else ''}"
        history = ",".join(f"{threshold:g}" for threshold in self.thresholds)
        return f"{prompt_digest(self.prompt.prompt_ids)}/{length}/{history}"

    @property
    def prompt_id(self) -> str:
        """That of its prompt."""
        return self.prompt.prompt_id

    def threshold(self, step: int) -> float:
        """Of a step, from 1."""
        return self.thresholds[min(step, len(self.thresholds)) - 1]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a file of prompts; other fields are skipped."""

    prompt_ids: list[TokenId] | None = None
    prompt_id: str | None = None
    n_output: Count | None = None


def read_prompts(path: Path, *, n_output: int) -> list[Prompt]:
    """Prompts of a file of JSON lines: `prompt_ids`, and where it differs `n_output`; `prompt_id`
    where prompts belong together. Raises InvalidRequestError, naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(
            f"prompts {path} cannot be read: {error.strerror}; give a file of JSON lines"
        ) from error
    prompts = [
        _to_prompt(path, number, line, n_output) for number, line in enumerate(lines, 1) if line
    ]
    if not prompts:
        raise InvalidRequestError(f"prompts {path} holds none; give a file of JSON lines")
    return prompts


def plan_runs(
    prompts: Iterable[Prompt],
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    n_switching: int = N_SWITCHING,
    last_switch: int = LAST_SWITCH,
    seed: int = 0,
    ignore_eos: bool = False,
) -> list[PlannedRun]:
    """Every prompt at each threshold, then `n_switching` times at changing ones: chosen at random
    for up to `last_switch` steps. The same for the same prompt, whatever others there are; what
    would be the same run again is left out."""
    runs = [
        PlannedRun(prompt, history, ignore_eos)
        for prompt in prompts
        for history in _histories(prompt, thresholds, n_switching, last_switch, seed)
    ]
    return list({run.run_id: run for run in runs}.values())


class Recorder:
    """Runs planned runs with a model, as many at a time as `concurrency` says: one leaves when it
    is done, the next takes its place."""

    def __init__(
        self,
        model: Model,
        model_id: str,
        *,
        cache: CacheMode = "dual",
        block_length: int = 32,
        concurrency: int = 16,
    ) -> None:
        self._model = model
        self._model_id = model_id
        self._cache: CacheMode = cache
        self._block_length = block_length
        self._concurrency = concurrency

    def record(self, runs: Sequence[PlannedRun]) -> Iterator[list[RecordedStep]]:
        """All steps of each run, as soon as it is done. Raises NeverFitsError and
        InvalidRequestError as Engine.add does."""
        if not runs:
            return
        engine = self._engine(runs)
        waiting = iter(runs)
        under_way: dict[str, tuple[PlannedRun, list[RecordedStep]]] = {}

        def begin_next() -> None:
            if (run := next(waiting, None)) is not None:
                engine.add(self._request(run))
                under_way[run.run_id] = (run, [])

        for _ in range(min(self._concurrency, len(runs))):
            begin_next()
        while (output := engine.step()) is not None:
            for step in output.steps:
                run, steps = under_way[step.request_id]
                steps.append(self._recorded(run, step, 1000 * output.latency_s))
                engine.set_credit(run.run_id, Credit(run.threshold(step.step + 1), WITHOUT_END))
                if step.finish_reason is not None:
                    engine.remove(run.run_id)
                    del under_way[run.run_id]
                    begin_next()
                    yield steps

    def _engine(self, runs: Sequence[PlannedRun]) -> Engine:
        for run in runs:
            spec = self._spec(run)
            check_length(self._model, run.prompt.prompt_ids, spec, request_id=run.run_id)
        longest = max(len(run.prompt.prompt_ids) + run.prompt.n_output for run in runs)
        n_tokens = min(self._concurrency, len(runs)) * (longest + PAGE_TOKENS)
        return Engine(
            self._model, cache_mode=self._cache, n_kv_tokens=n_tokens, max_batch_tokens=n_tokens
        )

    def _request(self, run: PlannedRun) -> EngineRequest:
        credit = Credit(run.threshold(1), WITHOUT_END)
        canvas = [MASKED] * run.prompt.n_output
        return EngineRequest(run.run_id, run.prompt.prompt_ids, self._spec(run), 0, canvas, credit)

    def _spec(self, run: PlannedRun) -> DecodingSpec:
        return DecodingSpec(
            n_output=run.prompt.n_output,
            block_length=self._block_length,
            seed=0,
            ignore_eos=run.ignore_eos,
        )

    def _recorded(self, run: PlannedRun, step: StepOutput, latency_ms: float) -> RecordedStep:
        return RecordedStep(
            model_id=self._model_id,
            prompt_id=run.prompt_id,
            run_id=run.run_id,
            n_output=run.prompt.n_output,
            block_length=self._block_length,
            step=step.step,
            kind=step.kind,
            block=step.block,
            n_unmasked=step.n_unmasked,
            n_block_masked=step.n_block_masked,
            threshold=step.threshold,
            confidence=step.stats,
            latency_ms=latency_ms,
            finish_reason=step.finish_reason,
            cache_mode=self._cache,
        )


def _to_prompt(path: Path, number: int, line: bytes, n_output: int) -> Prompt:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"prompts {path}, line {number}: {error}; mend it") from error
    if given.prompt_ids is None:
        raise InvalidRequestError(
            f"prompts {path}, line {number} has no prompt_ids; turn text into token ids with "
            "`dilaserve tokenize`"
        )
    return Prompt(
        prompt_id=given.prompt_id or prompt_digest(given.prompt_ids),
        prompt_ids=given.prompt_ids,
        n_output=given.n_output or n_output,
    )


def _histories(
    prompt: Prompt, thresholds: Sequence[float], n_switching: int, last_switch: int, seed: int
) -> Iterator[tuple[float, ...]]:
    """Thresholds of the runs of a prompt."""
    for threshold in thresholds:
        yield (threshold,)
    chance = random.Random(f"{seed}/{prompt.prompt_id}")
    for _ in range(n_switching):
        n_steps = chance.randint(2, max(2, last_switch))
        yield tuple(chance.choice(thresholds) for _ in range(n_steps))
