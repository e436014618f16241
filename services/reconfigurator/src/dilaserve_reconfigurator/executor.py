"""Feeds an execution: carries its effects out with a launcher, a drainer and what the bus says.

Decides nothing. Names are those of workers (DILASERVE_WORKER_NAME), which survive a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dilaserve.errors import UnavailableError
from dilaserve_reconfigurator.alone import LONGEST_LOOK_S, AwakeClock
from dilaserve_reconfigurator.execution import (
    Abort,
    Drain,
    Drained,
    Effect,
    End,
    Ended,
    Event,
    Execution,
    Failed,
    Launch,
    Lost,
    Patience,
    Phase,
    Resume,
    Stop,
    Up,
)
from dilaserve_reconfigurator.launchers import Launcher, LaunchError
from dilaserve_reconfigurator.route import Route, find_route
from dilaserve_reconfigurator.stage2 import Placed, Transition

__all__ = ["Drainer", "Executor", "Report", "Stage"]

DRAIN_EVERY_S = 0.5
"""How often an instance's emptying is asked for again."""

Stage = Phase | Literal["wanted", "stopped", "launched"]
"""Moments of a plan by name: its phases; what is wanted is written down; one process has ended; one
exists and does not serve yet."""

log = logging.getLogger(__name__)


class Drainer(Protocol):
    """Empties instances, so that ending them loses nobody's time. Both raise UnavailableError
    where nobody can, for now."""

    async def drain(self, name: str) -> int:
        """Give it nothing more; how many requests it still holds. Holds for a while only: whoever
        wants it says it again, also after it has ended, until its successor serves."""
        ...

    async def resume(self, name: str) -> None:
        """Take that back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How an execution ended."""

    phase: End
    reason: str
    lowest: int
    """Fewest GPUs that served on the way."""
    floor: int
    """GPUs that were to serve all the time."""
    pause_s: float
    """Seconds in which fewer served than that, or none."""
    seconds: float


class Executor:
    """Carries transitions out, one at a time.

    `served_by(name)` returns once an instance of that name serves; `new_name()` names one to be
    launched; `floor`: GPUs that are to serve all the time; `at(stage)` is called at every stage
    (fault tests).
    """

    def __init__(
        self,
        launcher: Launcher,
        drainer: Drainer,
        *,
        served_by: Callable[[str], Awaitable[None]],
        new_name: Callable[[], str],
        clock: Callable[[], float],
        patience: Patience,
        nodes: Sequence[int] = (),
        floor: int = 0,
        at: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._launcher = launcher
        self._drainer = drainer
        self._served_by = served_by
        self._new_name = new_name
        self._clock = clock
        self._patience = patience
        self._nodes = tuple(nodes)
        self._floor = floor
        self._at = at

    async def running(self) -> tuple[Placed, ...]:
        """What runs, as stage 2 takes it."""
        return tuple(Placed(each.name, each.slot) for each in await self._launcher.running())

    async def end(self, name: str) -> None:
        """End an instance, by force if it has to be. Raises LaunchError."""
        await self._launcher.stop(name)

    def at(self, stage: Stage) -> None:
        """Whoever drives it is at a stage of its own."""
        self._at(stage)

    async def execute(self, transition: Transition) -> Report:
        """To the end, or to where it has to be given up. Either way the cluster is valid."""
        running = await self.running()
        route = find_route(transition, running)
        if not route.keeps(self._floor):
            floor = f"{self._floor} GPUs are to serve all the time"
            log.warning("%s, and on the way only %d can; requests may wait", floor, route.lowest)
        execution = Execution(route, running, self._patience, nodes=self._nodes, floor=self._floor)
        return await self._follow(route, execution, running)

    async def _follow(
        self, route: Route, execution: Execution, running: Sequence[Placed]
    ) -> Report:
        clock = AwakeClock(self._clock)
        began = clock()
        events: asyncio.Queue[Event] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            run = _Run(self, events, tasks)
            run.look_after(running)
            run.carry_out(execution.start(began))
            while not execution.is_over:
                self._at(execution.phase)
                event = await _within(events.get(), execution.wake_at(), clock())
                now = clock()
                run.carry_out(
                    execution.handle(now, event) if event is not None else execution.tick(now)
                )
            self._at(execution.phase)
            run.end()
        if execution.reason:
            log.warning("%s a plan: %s", execution.phase.replace("_", " "), execution.reason)
        now = clock()
        return Report(
            phase=execution.end,
            reason=execution.reason,
            lowest=min(route.lowest, execution.capacity.lowest),
            floor=self._floor,
            pause_s=execution.capacity.paused_s(now),
            seconds=now - began,
        )


class _Run:
    """The tasks of one execution."""

    def __init__(
        self, executor: Executor, events: asyncio.Queue[Event], tasks: asyncio.TaskGroup
    ) -> None:
        self._launcher, self._drainer = executor._launcher, executor._drainer
        self._served_by, self._new_name = executor._served_by, executor._new_name
        self._at = executor._at
        self._events = events
        self._tasks = tasks
        self._watching: list[asyncio.Task[None]] = []
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}

    def look_after(self, running: Sequence[Placed]) -> None:
        """Say so if one of these ends."""
        for placed in running:
            self._watch(self._outlive(placed.instance_id))

    def carry_out(self, effects: list[Effect]) -> None:
        """Each in a task of its own."""
        if any(isinstance(effect, Drain) for effect in effects):
            self._let_go()  # the successors of those before serve
        for effect in effects:
            log.info("%s", effect)
            match effect:
                case Drain():
                    drain = self._drain(effect.instance_id)
                    self._draining[effect.instance_id] = self._tasks.create_task(drain)
                case Resume():
                    self._draining.pop(effect.instance_id).cancel()  # before it is taken back
                    self._tasks.create_task(self._resume(effect.instance_id))
                case Stop():
                    self._watch(self._stop(effect.instance_id))
                case Launch():
                    self._watch(self._launch(effect))
                case Abort():
                    name = self._names[effect.attempt]
                    self._tasks.create_task(self._launcher.stop(name))

    def end(self) -> None:
        """Nobody waits for anything any more."""
        self._let_go()
        for task in self._watching:
            task.cancel()

    def _watch(self, work: Coroutine[object, object, None]) -> None:
        self._watching.append(self._tasks.create_task(work))

    def _let_go(self) -> None:
        for task in self._draining.values():
            task.cancel()
        self._draining.clear()

    async def _drain(self, name: str) -> None:
        """Until it is cancelled: what is not said again is void."""
        is_told, trouble = False, ""
        while True:
            try:
                is_empty = await self._drainer.drain(name) == 0
                trouble = ""
            except UnavailableError as error:
                is_empty = False
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("%s cannot be emptied now, trying again: %s", name, trouble)
            if is_empty and not is_told:
                is_told = True
                self._events.put_nowait(Drained(name))
            await asyncio.sleep(DRAIN_EVERY_S)

    async def _resume(self, name: str) -> None:
        try:
            await self._drainer.resume(name)
        except UnavailableError as error:
            log.warning("%s gets no requests for a while: %s", name, error)

    async def _stop(self, name: str) -> None:
        try:
            await self._launcher.stop(name)
        except LaunchError as error:
            log.warning("%s is not ended, trying again later: %s", name, error)
            return
        self._at("stopped")
        self._events.put_nowait(Ended(name))

    async def _launch(self, wanted: Launch) -> None:
        name = self._names[wanted.attempt] = self._new_name()
        try:
            await self._launcher.launch(name, wanted.slot)
        except LaunchError as error:
            self._events.put_nowait(Failed(wanted.attempt, str(error)))
            return
        self._at("launched")
        ending = asyncio.ensure_future(self._launcher.wait(name))
        serving = asyncio.ensure_future(self._served_by(name))
        try:
            await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await self._launcher.stop(name)
                reason = f"{name} ended instead of serving: {ending.result()}"
                self._events.put_nowait(Failed(wanted.attempt, reason))
                return
            self._events.put_nowait(Up(wanted.attempt, name))
        finally:
            ending.cancel()
            serving.cancel()
        await self._outlive(name)

    async def _outlive(self, name: str) -> None:
        why = await self._launcher.wait(name)
        log.info("%s has ended: %s", name, why)
        self._events.put_nowait(Lost(name))


async def _within(
    awaitable: Coroutine[object, object, Event], until: float | None, now: float
) -> Event | None:
    """None when the time is over, or it is time to look at the clock."""
    left_s = LONGEST_LOOK_S if until is None else min(until - now, LONGEST_LOOK_S)
    try:
        async with asyncio.timeout(max(left_s, 0.0)):
            return await awaitable
    except TimeoutError:
        return None
