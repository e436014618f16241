"""Keeps a list of children running: started together, awaited, ended in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import groupby

from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.child import Child, ChildSpec
from dilaserve.supervisor.restarts import RestartPolicy

__all__ = ["Supervisor"]

WAIT_INTERVAL_S = 0.02


class Supervisor:
    """`log` takes (child's name, line); `changed` is called after every change of a child."""

    def __init__(
        self,
        *,
        policy: RestartPolicy,
        log: Callable[[str, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.children: list[Child] = []
        self._policy = policy
        self._log = log
        self._changed = changed

    def start(self, specs: Iterable[ChildSpec]) -> list[Child]:
        """Start children and return at once."""
        started = [
            Child(spec, policy=self._policy, log=self._log, changed=self._changed) for spec in specs
        ]
        self.children.extend(started)
        for child in started:
            child.start()
        return started

    async def wait_ready(self, children: Iterable[Child], *, timeout_s: float) -> None:
        """Until all are ready. Raises DiLaServeError when one is given up or time is up."""
        waiting = list(children)
        try:
            async with asyncio.timeout(timeout_s):
                while waiting := [child for child in waiting if child.phase != "ready"]:
                    for child in waiting:
                        _raise_if_given_up(child)
                    await asyncio.sleep(WAIT_INTERVAL_S)
        except TimeoutError:
            names = ", ".join(child.spec.name for child in waiting)
            raise DiLaServeError(
                f"{names} not ready after {timeout_s:.0f} s; the log above says what it waits for"
            ) from None

    async def wait(self) -> None:
        """Until every child is stopped or given up."""
        await asyncio.gather(*(child.wait() for child in self.children))

    async def stop(self) -> None:
        """End all children, those started last first, the members of a service together."""
        newest_first = groupby(reversed(self.children), key=lambda child: child.spec.service)
        for _, members in [(service, list(group)) for service, group in newest_first]:
            await asyncio.gather(*(child.stop() for child in members))

    def __getitem__(self, name: str) -> Child:
        """The child of this name."""
        return next(child for child in self.children if child.spec.name == name)


def _raise_if_given_up(child: Child) -> None:
    if child.phase == "given_up":
        tail = "\n  ".join(child.tail)
        raise DiLaServeError(f"{child.spec.name} does not start; it said:\n  {tail}")
