"""Feeds an execution: carries its effects out with a launcher, a drainer and what the bus says.

Decides nothing. Names are those of workers (DILASERVE_WORKER_NAME), which survive a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from dilaserve.errors import UnavailableError
from dilaserve_reconfigurator.execution import (
    Abort,
    Drain,
    Drained,
    Effect,
    Ended,
    Event,
    Execution,
    Failed,
    Launch,
    Patience,
    Phase,
    Resume,
    Stop,
    Up,
)
from dilaserve_reconfigurator.launchers import Launcher, LaunchError
from dilaserve_reconfigurator.route import Route, find_route
from dilaserve_reconfigurator.stage2 import Placed, Transition

__all__ = ["Drainer", "Executor", "Report"]

log = logging.getLogger(__name__)


class Drainer(Protocol):
    """Empties instances, so that ending them loses nobody's time. Both raise UnavailableError
    where nobody can."""

    async def drain(self, name: str) -> None:
        """Give it nothing more; returns when it holds nothing."""
        ...

    async def resume(self, name: str) -> None:
        """Take that back."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """How an execution ended."""

    phase: Phase
    """done or given_up."""
    reason: str
    lowest: int
    """Fewest GPUs that served on the way, by plan."""
    seconds: float


class Executor:
    """Carries transitions out, one at a time.

    `served_by(name)` returns once an instance of that name serves; `new_name()` names one to be
    launched; `at(phase)` is called whenever the execution enters a phase (fault tests).
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
        at: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        self._launcher = launcher
        self._drainer = drainer
        self._served_by = served_by
        self._new_name = new_name
        self._clock = clock
        self._patience = patience
        self._at = at

    async def running(self) -> tuple[Placed, ...]:
        """What runs, as stage 2 takes it."""
        return tuple(Placed(each.name, each.slot) for each in await self._launcher.running())

    async def execute(self, transition: Transition) -> Report:
        """To the end, or to where it has to be given up. Either way the cluster is valid."""
        running = await self.running()
        route = find_route(transition, running)
        return await self._follow(route, Execution(route, running, self._patience))

    async def _follow(self, route: Route, execution: Execution) -> Report:
        began = self._clock()
        events: asyncio.Queue[Event] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            run = _Run(self, events, tasks)
            run.carry_out(execution.start(began))
            while not execution.is_over:
                self._at(execution.phase)
                event = await _within(events.get(), execution.wake_at(), self._clock())
                now = self._clock()
                run.carry_out(
                    execution.handle(now, event) if event is not None else execution.tick(now)
                )
            run.end()
        if execution.phase == "given_up":
            log.warning("gave a plan up: %s", execution.reason)
        seconds = self._clock() - began
        return Report(execution.phase, execution.reason, route.lowest, seconds)


class _Run:
    """The tasks of one execution."""

    def __init__(
        self, executor: Executor, events: asyncio.Queue[Event], tasks: asyncio.TaskGroup
    ) -> None:
        self._launcher, self._drainer = executor._launcher, executor._drainer
        self._served_by, self._new_name = executor._served_by, executor._new_name
        self._events = events
        self._tasks = tasks
        self._watching: list[asyncio.Task[None]] = []
        self._names: dict[int, str] = {}

    def carry_out(self, effects: list[Effect]) -> None:
        """Each in a task of its own."""
        for effect in effects:
            log.info("%s", effect)
            match effect:
                case Drain():
                    self._watch(self._drain(effect.instance_id))
                case Resume():
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
        for task in self._watching:
            task.cancel()

    def _watch(self, work: Coroutine[object, object, None]) -> None:
        self._watching.append(self._tasks.create_task(work))

    async def _drain(self, name: str) -> None:
        try:
            await self._drainer.drain(name)
        except UnavailableError as error:
            # It says goodbye when it is stopped, and its requests move then.
            log.warning("%s is stopped without having been emptied: %s", name, error)
        self._events.put_nowait(Drained(name))

    async def _resume(self, name: str) -> None:
        try:
            await self._drainer.resume(name)
        except UnavailableError as error:
            log.warning("%s may get no requests until the scheduler is back: %s", name, error)

    async def _stop(self, name: str) -> None:
        await self._launcher.stop(name)
        self._events.put_nowait(Ended(name))

    async def _launch(self, wanted: Launch) -> None:
        name = self._names[wanted.attempt] = self._new_name()
        try:
            await self._launcher.launch(name, wanted.slot)
        except LaunchError as error:
            self._events.put_nowait(Failed(wanted.attempt, str(error)))
            return
        ending = asyncio.ensure_future(self._launcher.wait(name))
        serving = asyncio.ensure_future(self._served_by(name))
        try:
            await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await self._launcher.stop(name)
                reason = f"{name} ended instead of serving: {ending.result()}"
                self._events.put_nowait(Failed(wanted.attempt, reason))
            else:
                self._events.put_nowait(Up(wanted.attempt))
        finally:
            ending.cancel()
            serving.cancel()


async def _within(
    awaitable: Coroutine[object, object, Event], until: float | None, now: float
) -> Event | None:
    """None when the time is over."""
    try:
        async with asyncio.timeout(None if until is None else max(until - now, 0.0)):
            return await awaitable
    except TimeoutError:
        return None
