"""Steps that a real model takes: every request of the virtual cluster is denoised by the engine of
the worker, and its answer can be checked. With `tiny` the only module here that needs torch.

Passes that are under way on several instances are computed together, when the first of them ends:
their rows are fixed by then, and the engine's results do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.models.model import Model

__all__ = ["ModelCourse", "ModelSource"]

ANY_BLOCK = 2**31
NO_CREDIT = Credit(threshold=1.0, until_block=-1)


class ModelSource:
    """See StepSource. `prompt_of` tells the real prompt of a request by its id: the one that the
    twin sees stands for its length only, which may be another.

    `n_kv_tokens` has to hold everything that runs on all instances at a time, by real lengths;
    `max_batch_tokens` bounds one real forward pass.
    """

    def __init__(
        self,
        model: Model,
        prompt_of: Callable[[str], list[int]],
        *,
        cache_mode: CacheMode,
        n_kv_tokens: int = 1 << 17,
        max_batch_tokens: int = 1 << 14,
    ) -> None:
        self._prompt_of = prompt_of
        self._max_batch_tokens = max_batch_tokens
        self._engine = Engine(
            model,
            cache_mode=cache_mode,
            n_kv_tokens=n_kv_tokens,
            max_batch_tokens=max_batch_tokens,
        )
        self._n_courses = 0
        self._planned: dict[str, ModelCourse] = {}

    def begin(self, request: EngineRequest) -> ModelCourse:
        """See StepSource. Two instances may hold the same request, so courses have keys."""
        self._n_courses += 1
        key = f"{request.request_id}/{self._n_courses}"
        real = replace(
            request, request_id=key, prompt=self._prompt_of(request.request_id), credit=NO_CREDIT
        )
        self._engine.add(real)
        return ModelCourse(self, request.request_id, key, len(real.prompt) + len(real.canvas))

    def plan(self, course: ModelCourse) -> None:
        """It takes part in a pass that begins now."""
        self._planned[course.key] = course

    def compute(self, course: ModelCourse) -> None:
        """Run everything that is planned, unless that was done already."""
        while course.key in self._planned:
            self._compute_batch(self._next_batch())

    def forget(self, course: ModelCourse) -> None:
        """It is over."""
        self._planned.pop(course.key, None)
        self._engine.remove(course.key)

    def _next_batch(self) -> list[ModelCourse]:
        """As many courses as one forward pass may hold; at least one."""
        batch: list[ModelCourse] = []
        n_tokens = 0
        for course in self._planned.values():
            n_tokens += course.n_tokens
            if batch and n_tokens > self._max_batch_tokens:
                break
            batch.append(course)
        return batch

    def _compute_batch(self, courses: list[ModelCourse]) -> None:
        engine = self._engine
        for course in courses:
            next_step = engine.step_of(course.key) + 1
            engine.set_credit(course.key, Credit(course.threshold, ANY_BLOCK, next_step))
        output = engine.step()
        steps = {step.request_id: step for step in output.steps} if output is not None else {}
        for course in courses:
            del self._planned[course.key]
            engine.set_credit(course.key, NO_CREDIT)
            course.take(steps.get(course.key))


class ModelCourse:
    """See Course."""

    __slots__ = ("_output", "_source", "key", "kind", "n_tokens", "request_id", "threshold")

    def __init__(self, source: ModelSource, request_id: str, key: str, n_tokens: int) -> None:
        self._source = source
        self._output: StepOutput | None = None
        self.request_id = request_id
        self.key = key
        self.n_tokens = n_tokens
        self.kind: RowKind = "recompute"
        self.threshold = 0.0

    def plan(self, kind: RowKind, threshold: float) -> None:
        """See Course."""
        self.kind, self.threshold = kind, threshold
        self._source.plan(self)

    def run(self) -> StepOutput | None:
        """See Course."""
        self._source.compute(self)
        return self._output

    def committed(self) -> None:
        """See Course; the store keeps the canvas."""

    def end(self) -> None:
        """See Course."""
        self._source.forget(self)

    def take(self, output: StepOutput | None) -> None:
        """What the engine made of the planned row. Raises RuntimeError if that was another."""
        done = output.kind if output is not None else "rebuild"
        if done != self.kind:
            raise RuntimeError(
                f"{self.key}: a {self.kind} row was planned and the engine did a {done} row, or "
                "none for want of KV pages; give the model source more n_kv_tokens"
            )
        self._output = replace(output, request_id=self.request_id) if output is not None else None
