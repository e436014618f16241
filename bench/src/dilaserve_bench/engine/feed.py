"""Requests for a bare engine, and two ways to feed it: continuously, or batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest

__all__ = ["Feed", "Work", "requests_of"]

WITHOUT_END = 2**31


@dataclass(frozen=True, slots=True)
class Work:
    """Requests with random prompts, the same at every time."""

    vocab_size: int
    n_prompt: int
    outputs: Sequence[int]
    """Canvas lengths, in turn."""
    threshold: float
    block_length: int = 32

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.n_prompt + max(self.outputs)


def requests_of(work: Work, *, canvas: int | None = None) -> Iterator[EngineRequest]:
    """Without end. `canvas`: the same for all, however much of it is wanted."""
    draw = np.random.default_rng(0)
    number = 0
    while True:
        n_output = canvas or work.outputs[number % len(work.outputs)]
        prompt = draw.integers(0, work.vocab_size, work.n_prompt).tolist()
        yield EngineRequest(
            request_id=str(number),
            prompt=prompt,
            spec=DecodingSpec(
                n_output=n_output, block_length=work.block_length, seed=number, ignore_eos=True
            ),
            step=0,
            canvas=[MASKED] * n_output,
            credit=Credit(work.threshold, WITHOUT_END),
        )
        number += 1


class Feed:
    """Keeps an engine at work. `take` requests at most are held at a time; continuous: where one
    ends, the next one starts; else the next ones start when all have ended."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[EngineRequest],
        concurrency: int,
        *,
        is_continuous: bool = True,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._concurrency = concurrency
        self._is_continuous = is_continuous
        self._held: set[str] = set()

    @property
    def n_held(self) -> int:
        """Requests under way."""
        return len(self._held)

    def fill(self) -> bool:
        """Add what may start now; False when nothing is held."""
        if self._is_continuous or not self._held:
            while len(self._held) < self._concurrency:
                request = next(self._requests, None)
                if request is None:
                    break
                self._engine.add(request)
                self._held.add(request.request_id)
        return bool(self._held)

    def drop_finished(self, output: BatchOutput) -> list[str]:
        """Remove the requests that a pass finished, and say which."""
        finished = [step.request_id for step in output.steps if step.finish_reason is not None]
        for request_id in finished:
            self._drop(request_id)
        return finished

    def clear(self) -> None:
        """Remove all."""
        for request_id in list(self._held):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._engine.remove(request_id)
        self._held.remove(request_id)
