"""What a worker says on the bus. Everything is a hint: what cannot be sent is counted, and lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import BusUnavailableError
from dilaserve.messages import (
    CommitOutcome,
    Heartbeat,
    Held,
    InstanceDown,
    InstanceInfo,
    InstanceUp,
    Message,
    Rejected,
    StepItemResult,
    StepResult,
    TokenDelta,
    encode,
)
from dilaserve_gpu_worker.engine.types import BatchOutput, StepOutput
from dilaserve_gpu_worker.holdings import Holding, Unanswered
from dilaserve_gpu_worker.observe import WorkerMetrics

__all__ = ["Reports", "item_result"]

log = logging.getLogger(__name__)


class Reports:
    """Publishes for one instance."""

    def __init__(self, bus: Bus, info: InstanceInfo, metrics: WorkerMetrics) -> None:
        self._bus = bus
        self._info = info
        self._metrics = metrics

    async def up(self) -> None:
        """The instance takes commands."""
        await self._publish(subjects.event_up(self._info.instance_id), InstanceUp(info=self._info))

    async def down(self, reason: str) -> None:
        """The instance leaves on purpose."""
        await self._publish(
            subjects.event_down(self._info.instance_id),
            InstanceDown(instance_id=self._info.instance_id, reason=reason),
        )

    async def heartbeat(
        self, *, applied: tuple[int, int], n_free_kv_tokens: int, holds: list[Held]
    ) -> None:
        """The instance is alive; `applied` is (term, seq) of its last command."""
        term, seq = applied
        await self._publish(
            subjects.event_heartbeat(self._info.instance_id),
            Heartbeat(
                info=self._info,
                term=term,
                seq=seq,
                n_free_kv_tokens=n_free_kv_tokens,
                holds=holds,
            ),
        )

    async def tokens(self, holding: Holding, output: StepOutput) -> None:
        """A committed step, for the gateway of its request."""
        await self._publish(
            subjects.tokens(holding.gateway_id),
            TokenDelta(
                request_id=output.request_id,
                epoch=holding.epoch,
                step=output.step,
                positions=output.positions,
                tokens=output.tokens,
                confidences=output.confidences,
                kind=output.kind,
                threshold=output.threshold,
                worker=self._info.instance_id,
                rebuilt=output.rebuilt,
                finish_reason=output.finish_reason,
            ),
        )

    async def step(
        self,
        batch: int,
        output: BatchOutput,
        steps: Sequence[Unanswered],
        outcomes: Sequence[CommitOutcome],
    ) -> None:
        """One pass, after the store's answers, one per step."""
        await self._publish(
            subjects.event_step(self._info.instance_id),
            StepResult(
                instance_id=self._info.instance_id,
                batch=batch,
                latency_ms=output.latency_s * 1000,
                n_tokens=output.n_tokens,
                n_rebuilds=output.n_rebuilds,
                items=[
                    item_result(holding, step, outcome)
                    for (holding, step), outcome in zip(steps, outcomes, strict=True)
                ],
            ),
        )

    async def rejected(self, batch: int, rejected: list[Rejected]) -> None:
        """Credited requests that the instance cannot run; `batch` is the last pass."""
        await self._publish(
            subjects.event_step(self._info.instance_id),
            StepResult(
                instance_id=self._info.instance_id,
                batch=batch,
                latency_ms=0.0,
                n_tokens=0,
                rejected=rejected,
            ),
        )

    async def _publish(self, subject: str, message: Message) -> None:
        try:
            await self._bus.publish(subject, encode(message))
        except BusUnavailableError as error:
            self._metrics.dropped("unsent")
            log.debug("%s not sent: %s", subject, error)


def item_result(holding: Holding, output: StepOutput, outcome: CommitOutcome) -> StepItemResult:
    """What a step did to its request, for the scheduler."""
    return StepItemResult(
        request_id=output.request_id,
        epoch=holding.epoch,
        step=output.step,
        block=output.block,
        kind=output.kind,
        threshold=output.threshold,
        outcome=outcome,
        n_new=len(output.tokens),
        n_unmasked=output.n_unmasked,
        n_block_masked=output.n_block_masked,
        confidence=output.stats,
        finish_reason=output.finish_reason,
    )
