"""The port between a virtual instance and what decides how far a denoising step gets."""

from __future__ import annotations

from typing import Protocol

from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import EngineRequest, StepOutput

__all__ = ["Course", "StepSource"]


class Course(Protocol):
    """One request on one instance. Of each pass that it takes part in: first `plan`, when the pass
    begins, then `run`, when it ends, and `committed`, when the store has taken the step."""

    def plan(self, kind: RowKind, threshold: float) -> None:
        """What its part of the pass is; fixed from now on."""
        ...

    def run(self) -> StepOutput | None:
        """What the step did; None for a rebuild."""
        ...

    def committed(self) -> None:
        """Whoever begins the request again begins behind this step."""
        ...

    def end(self) -> None:
        """The instance has forgotten the request, or died; a planned step is never run."""
        ...


class StepSource(Protocol):
    """All courses of a virtual cluster."""

    def begin(self, request: EngineRequest) -> Course:
        """Take up a request behind its last committed step. `request.prompt` has the length that
        counts, and no more than that."""
        ...
