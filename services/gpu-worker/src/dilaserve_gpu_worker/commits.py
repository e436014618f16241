"""Commits the steps of one pass: one round trip, and a second one for what the store has lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dilaserve.messages import CommitOutcome, InstanceInfo
from dilaserve.store import Store
from dilaserve.store.records import Commit
from dilaserve_gpu_worker.holdings import Unanswered
from dilaserve_gpu_worker.observe import WorkerMetrics
from dilaserve_gpu_worker.patience import Patience

__all__ = ["Committer"]


class Committer:
    """Writes for one instance. `patience` is that for a store that does not answer."""

    def __init__(
        self,
        store: Store,
        *,
        info: InstanceInfo,
        metrics: WorkerMetrics,
        clock: Callable[[], float],
        patience: Patience,
    ) -> None:
        self._store = store
        self._info = info
        self._metrics = metrics
        self._clock = clock
        self._patience = patience

    async def commit(
        self, steps: Sequence[Unanswered], latency_ms: float
    ) -> list[CommitOutcome] | None:
        """One answer per step, in order; `gap` only if even the whole canvas was not taken.
        None when patience ended before: the steps may or may not be stored."""
        outcomes = await self._ask([self._step(s, latency_ms) for s in steps])
        if outcomes is None:
            return None
        gaps = [i for i, outcome in enumerate(outcomes) if outcome == "gap"]
        if gaps:
            again = await self._ask([self._canvas(steps[i], latency_ms) for i in gaps])
            if again is None:
                return None
            for i, outcome in zip(gaps, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def _ask(self, commits: list[Commit]) -> list[CommitOutcome] | None:
        if not commits:
            return []
        started = self._clock()
        outcomes = await self._patience.until_answered(
            lambda: self._store.commit(commits), what=f"commit of {len(commits)} steps"
        )
        if outcomes is not None:
            self._metrics.answered(self._clock() - started, outcomes)
        return outcomes

    def _step(self, step: Unanswered, latency_ms: float, canvas: list[int] | None = None) -> Commit:
        holding, output = step
        return Commit(
            request_id=output.request_id,
            epoch=holding.epoch,
            step=output.step,
            block=output.block,
            kind=output.kind,
            threshold=output.threshold,
            worker=self._info.instance_id,
            latency_ms=latency_ms,
            positions=output.positions,
            tokens=output.tokens,
            confidences=output.confidences,
            stats=output.stats,
            cache_mode=self._info.cache_mode,
            rebuilt=output.rebuilt,
            weights_hash=self._info.weights_hash,
            finish_reason=output.finish_reason,
            canvas=canvas,
        )

    def _canvas(self, step: Unanswered, latency_ms: float) -> Commit:
        holding, output = step
        return self._step(step, latency_ms, holding.canvas_after(output))
