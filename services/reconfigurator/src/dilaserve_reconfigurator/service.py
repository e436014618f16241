"""The planner on the bus: it watches the workload and proposes; with a keeper it also carries out.

Arrivals are the submissions that the gateway sends to the scheduler, overheard: so those that the
scheduler refuses, or does not even receive, count as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from dilaserve import __version__, subjects
from dilaserve.bus import Bus, BusMessage, ServiceCard
from dilaserve.errors import BusUnavailableError, DiLaServeError
from dilaserve.messages import (
    Cancel,
    Heartbeat,
    InstanceDown,
    InstanceUp,
    StepResult,
    Submit,
    decode_request,
    decode_worker_event,
    encode,
)
from dilaserve.plan_messages import PlanApplied, PlannedMix, PlanProposed
from dilaserve.process import Identity
from dilaserve.telemetry import Telemetry
from dilaserve_reconfigurator.applying import Applying
from dilaserve_reconfigurator.holding import HoldingPlanner
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.members import Members
from dilaserve_reconfigurator.monitor import Missing, Monitor
from dilaserve_reconfigurator.observe import PlannerMetrics
from dilaserve_reconfigurator.outcomes import Outcomes
from dilaserve_reconfigurator.planner import Cluster, Planner
from dilaserve_reconfigurator.record import Mix, PlanRecord, Plans, mix_text
from dilaserve_reconfigurator.silence import Silence

__all__ = ["Clocks", "ReconfiguratorService"]

KEEP_EVERY_S = 1.0
"""How often it is looked whether all instances run that are wanted."""

RETRY_S = 30.0
"""After a launch that failed however often it was tried."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds: since any moment, never going back; and since the epoch."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


class ReconfiguratorService:
    """Proposes a plan every so often until it is stopped."""

    def __init__(
        self,
        bus: Bus,
        planner: Planner | HoldingPlanner,
        monitor: Monitor,
        members: Members,
        plans: Plans,
        identity: Identity,
        *,
        telemetry: Telemetry,
        clocks: Clocks,
        every_s: float,
        slo_s: float = 30.0,
        measure_s: float = 300.0,
        keeper: Keeper | None = None,
        silence: Silence | None = None,
    ) -> None:
        """`slo_s`: of requests that bring none; `measure_s`: for so long before and after a plan
        its effect is measured; `keeper`: None only proposes; `silence`: None ends nobody."""
        self._bus = bus
        self._planner = planner
        self._monitor = monitor
        self._members = members
        self._plans = plans
        self._identity = identity
        self._address = telemetry.address
        self._metrics = PlannerMetrics(telemetry)
        self._clocks = clocks
        self._every_s = every_s
        self._measure_s = measure_s
        self._keeper = keeper
        self._silence = silence or Silence(0.0, 0.0)
        self._outcomes = Outcomes(slo_s=slo_s)
        self._applying = None
        if keeper is not None:
            self._applying = Applying(
                keeper,
                plans,
                self._outcomes,
                self._metrics,
                say=partial(self._publish, subjects.PLAN_APPLIED),
                clock=clocks.monotonic,
                measure_s=measure_s,
            )
        self._keep_from_s = 0.0
        self._trouble = ""
        """What hinders the keeper, said once."""
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Watch and propose until `stop`."""
        listening = [
            await self._bus.subscribe(subjects.REQUEST_SUBMIT, self._asked),
            await self._bus.subscribe(subjects.REQUEST_CANCEL, self._asked),
            await self._bus.subscribe(subjects.ALL_WORKER_EVENTS, self._happened),
            await self._bus.serve(self._card(), []),
        ]
        working = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            # A plan that is under way is finished by the next start.
            working.cancel()
            stopping.cancel()
            await asyncio.wait([working, stopping])
            for subscription in listening:
                await subscription.unsubscribe()

    async def _work(self) -> None:
        """Look after the instances all the time, and plan every so often."""
        due_s = self._clocks.monotonic() + self._every_s
        look_s = self._every_s if self._keeper is None else KEEP_EVERY_S
        while True:
            await self._keep()
            if self._applying is not None:
                await self._applying.look()
            await asyncio.sleep(min(look_s, self._every_s))
            if self._clocks.monotonic() < due_s and self._keeper is not None:
                continue
            began_s = self._clocks.monotonic()
            due_s = began_s + self._every_s
            record = await self.propose()
            if record is None or record.verdict != "change":
                continue
            if self._clocks.monotonic() - began_s > self._measure_s:
                log.warning("%s is dropped: it was made of a load long past", record.plan_id)
                continue
            await self._apply(record)

    def stop(self, reason: str) -> None:
        """End `run` soon."""
        log.info("stopping: %s", reason)
        self._stopped.set()

    async def propose(self) -> PlanRecord | None:
        """Make one plan, keep it, and tell everyone. None if none could be made."""
        now = self._clocks.monotonic()
        workload = self._monitor.workload(now)
        try:
            cluster = await self._cluster(now)
            if isinstance(cluster, Missing):
                workload, cluster = cluster, Cluster((), ())
            record = await asyncio.to_thread(
                self._planner.plan, self._clocks.wall(), workload, cluster
            )
            await asyncio.to_thread(self._plans.save, record)
        except (DiLaServeError, OSError) as error:
            self._metrics.failed()
            log.warning("no plan: %s", error)
            return None
        self._metrics.made(record, self._clocks.monotonic() - now)
        log.info("%s: %s; %s", record.plan_id, _headline(record), "; ".join(record.reasons))
        await self._tell(record)
        return record

    async def _cluster(self, now: float) -> Cluster | Missing:
        return self._members.cluster(now) if self._keeper is None else await self._keeper.cluster()

    async def _keep(self) -> None:
        if self._keeper is None or self._clocks.monotonic() < self._keep_from_s:
            return
        try:
            await self._end_silent(self._keeper)
            report = await self._keeper.keep()
            self._trouble = ""
        except (DiLaServeError, OSError) as error:  # a TimeoutError is an OSError
            if str(error) != self._trouble:
                log.warning("the instances stay as they are: %s", error)
            self._trouble = str(error)
            report = None
        if report is not None and report.phase == "given_up":
            self._keep_from_s = self._clocks.monotonic() + RETRY_S

    async def _end_silent(self, keeper: Keeper) -> None:
        running = [placed.instance_id for placed in (await keeper.cluster()).running]
        for name in self._silence.look(self._clocks.monotonic(), running):
            log.warning("%s runs and is not heard: it is ended, and replaced", name)
            await keeper.end(name)

    async def _apply(self, record: PlanRecord) -> None:
        if self._applying is not None and await self._applying.apply(record):
            self._planner.changed(self._clocks.wall(), record)

    async def _tell(self, record: PlanRecord) -> None:
        message = PlanProposed(
            plan_id=record.plan_id,
            verdict=record.verdict,
            reasons=record.reasons,
            present=_planned(record.present),
            target=_planned(record.target),
        )
        await self._publish(subjects.PLAN_PROPOSED, message)

    async def _publish(self, subject: str, message: PlanProposed | PlanApplied) -> None:
        try:
            await self._bus.publish(subject, encode(message))
        except BusUnavailableError as error:
            log.warning("nobody was told of %s: %s", message.plan_id, error)

    # --- what happens --------------------------------------------------------------------------

    def _asked(self, message: BusMessage) -> None:
        try:
            submit = decode_request(message.data)
        except msgspec.DecodeError:
            return  # the scheduler, whom it was meant for, counts it
        self._silence.heard()
        if isinstance(submit, Submit):
            now, request_id = self._clocks.monotonic(), submit.request_id
            slo_s = submit.slo_ms / 1000 if submit.slo_ms is not None else None
            self._monitor.arrived(now, request_id, submit.n_prompt, submit.n_output, slo_s)
            self._outcomes.submitted(now, request_id, slo_s)
        elif isinstance(submit, Cancel):
            self._outcomes.cancelled(submit.request_id)

    def _happened(self, message: BusMessage) -> None:
        try:
            event = decode_worker_event(message.data)
        except msgspec.DecodeError as error:
            self._metrics.dropped()
            log.warning("dropped a message on %s: %s", message.subject, error)
            return
        now = self._clocks.monotonic()
        self._monitor.alive(now)
        self._silence.heard()
        match event:
            case InstanceUp() | Heartbeat():
                self._members.heard(now, event.info)
                self._silence.heard(event.info.name)
            case InstanceDown():
                self._members.left(event.instance_id)
            case StepResult():
                self._outcomes.stepped(now, event)

    def _card(self) -> ServiceCard:
        return ServiceCard(
            name="reconfigurator",
            version=__version__,
            description="Plans which TP degrees the cluster is made of",
            metadata=self._identity.card(self._address),
        )


def _planned(mix: Mix) -> PlannedMix:
    return PlannedMix(
        counts={str(degree): n for degree, n in mix.counts.items()},
        mean_threshold=mix.mean_threshold,
        mean_slack=mix.mean_slack,
        mean_latency_s=mix.mean_latency_s,
    )


def _headline(record: PlanRecord) -> str:
    present = mix_text(record.present.counts)
    if record.verdict == "change":
        return f"{mix_text(record.target.counts)} instead of {present}"
    return f"{record.verdict} {present}"
