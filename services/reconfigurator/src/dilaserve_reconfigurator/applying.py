"""Has plans carried out, and keeps with each what came of it: how it went, and then its effect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.plan_messages import PlanApplied
from dilaserve_reconfigurator.executor import Report
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.observe import PlannerMetrics
from dilaserve_reconfigurator.outcomes import Outcomes
from dilaserve_reconfigurator.record import CarriedOut, PlanRecord, Plans

__all__ = ["Applying"]

log = logging.getLogger(__name__)


class Applying:
    """Of one plan at a time the effect is measured: over `measure_s` after it was carried out, or
    until the next one begins."""

    def __init__(
        self,
        keeper: Keeper,
        plans: Plans,
        outcomes: Outcomes,
        metrics: PlannerMetrics,
        *,
        say: Callable[[PlanApplied], Awaitable[None]],
        clock: Callable[[], float],
        measure_s: float,
    ) -> None:
        self._keeper = keeper
        self._plans = plans
        self._outcomes = outcomes
        self._metrics = metrics
        self._say = say
        self._clock = clock
        self._measure_s = measure_s
        self._measured: PlanRecord | None = None
        self._measured_from_s = 0.0

    async def apply(self, record: PlanRecord) -> bool:
        """Carry it out, keep how that went, and tell everyone. Whether it is carried out."""
        await self._finish_measuring()
        began = self._clock()
        before = self._outcomes.observed(began - self._measure_s, began)
        carried = await self._carry_out(record)
        now = self._clock()
        record = msgspec.structs.replace(record, carried_out=carried, before=before)
        await self._save(record)
        is_done = carried.phase == "done"
        if is_done:
            self._measured, self._measured_from_s = record, now
        self._metrics.applied(carried)
        await self._say(
            PlanApplied(
                plan_id=record.plan_id,
                counts={str(degree): n for degree, n in (await self._counts()).items()},
                reason=carried.reason,
                seconds=carried.seconds,
                lowest_gpus=carried.lowest,
                pause_s=carried.pause_s,
            )
        )
        return is_done

    async def look(self) -> None:
        """Measure the effect of the last plan, if it is time."""
        if self._measured is not None and self._clock() >= self._measured_from_s + self._measure_s:
            await self._finish_measuring()

    async def _carry_out(self, record: PlanRecord) -> CarriedOut:
        try:
            report = await self._keeper.change_to(record.target.counts)
        except (DiLaServeError, OSError) as error:
            log.warning("%s was not carried out: %s", record.plan_id, error)
            return CarriedOut(phase="given_up", reason=str(error))
        return CarriedOut(phase="done") if report is None else _carried_out(report)

    async def _counts(self) -> dict[int, int]:
        try:
            return (await self._keeper.cluster()).counts(())
        except (DiLaServeError, OSError) as error:
            log.warning("what runs now is not known: %s", error)
            return {}

    async def _finish_measuring(self) -> None:
        record, self._measured = self._measured, None
        if record is None:
            return
        after = self._outcomes.observed(self._measured_from_s, self._clock())
        if after.seconds > 0.0:
            await self._save(msgspec.structs.replace(record, after=after))
            log.info("%s has had the effect %s", record.plan_id, after)

    async def _save(self, record: PlanRecord) -> None:
        try:
            await asyncio.to_thread(self._plans.save, record)
        except OSError as error:
            log.warning("what came of %s is not kept: %s", record.plan_id, error)


def _carried_out(report: Report) -> CarriedOut:
    return CarriedOut(
        phase=report.phase,
        reason=report.reason,
        seconds=report.seconds,
        lowest=report.lowest,
        floor=report.floor,
        pause_s=report.pause_s,
    )
