"""Launches instances as containers, of one Docker engine for each node.

An instance survives its launcher: labels say whose it is, its name and its slot, so the next
launcher finds it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, TypeVar

from dilaserve_reconfigurator.launchers import Launched, LaunchError, refuse_beside
from dilaserve_reconfigurator.launchers.docker_host import (
    NOT_FOUND,
    Container,
    ContainerSpec,
    HostError,
    RefusedError,
)
from dilaserve_reconfigurator.slots import Slot

__all__ = ["DockerLauncher", "Host", "cpu_spec", "gpu_spec"]

CLUSTER, HOST, NAME, SLOT = (f"dilaserve.{key}" for key in ("cluster", "host", "name", "slot"))
"""Labels. A slot is the indices of its GPUs."""
LOOK_EVERY_S = 0.2
"""For the end of one that was told to end."""
WATCH_EVERY_S = 1.0
"""For that of any other; a call to the engine for each."""
ASK_AGAIN_S = 2.0
N_LAST_LINES = 20

T = TypeVar("T")

log = logging.getLogger(__name__)


class Host(Protocol):
    """What is needed of a Docker engine; DockerHost says what each does, and raises."""

    name: str

    async def containers(self, labels: Mapping[str, str]) -> list[Container]: ...

    async def run(self, name: str, spec: ContainerSpec) -> None: ...

    async def signal(self, container_id: str, signal: Literal["SIGTERM", "SIGKILL"]) -> None: ...

    async def remove(self, container_id: str) -> None: ...

    async def last_words(self, container_id: str, n_lines: int) -> tuple[str, list[str]]: ...


class DockerLauncher:
    """See Launcher. `hosts` are the nodes, in order; `cluster` tells its containers from those of
    others on the same engines; `spec_of` adds what a slot needs to `spec`; `grace_s` is how long
    an instance may take to end by itself.

    For a host that does not answer counts what it said last. One that has said nothing yet raises
    HostError: nothing may be launched on GPUs that may be taken.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        cluster: str,
        spec: ContainerSpec,
        *,
        spec_of: Callable[[ContainerSpec, Slot], ContainerSpec],
        grace_s: float = 10.0,
    ) -> None:
        self._nodes = [_Node(number, host, cluster) for number, host in enumerate(hosts)]
        self._spec = spec
        self._spec_of = spec_of
        self._grace_s = grace_s

    async def running(self) -> list[Launched]:
        """See Launcher. Raises HostError and RefusedError."""
        found = await asyncio.gather(*(node.running() for node in self._nodes))
        return sorted((each for part in found for each in part), key=lambda each: each.name)

    async def launch(self, name: str, slot: Slot) -> None:
        """See Launcher."""
        spec = self._spec_of(self._spec, slot)
        environ = {**spec.environ, "DILASERVE_WORKER_NAME": name}
        try:
            for other in await self.running():
                refuse_beside(other, name, slot)
            await self._nodes[slot.node].launch(name, slot, replace(spec, environ=environ))
        except (HostError, RefusedError) as error:
            raise LaunchError(f"instance {name!r} cannot be launched: {error}") from error

    async def wait(self, name: str) -> str:
        """See Launcher. Waits for hosts that do not answer, too."""
        for node in self._nodes:
            words = await _insist(partial(node.wait, name))
            if words is not None:
                return words
        return "it has ended"

    async def stop(self, name: str) -> None:
        """See Launcher. Waits for hosts that do not answer, too."""
        for node in self._nodes:
            await _insist(partial(node.stop, name, self._grace_s))


class _Node:
    """The instances of one host. What it does is done one after the other."""

    def __init__(self, number: int, host: Host, cluster: str) -> None:
        self._number = number
        self._host = host
        self._labels = {CLUSTER: cluster, HOST: host.name}
        self._known: dict[str, Launched] | None = None
        """By name, as far as the host has said; None before it has said anything."""
        self._failed: set[str] = set()
        """Launches of which it is not known whether they came about; they must not."""
        self._answers = True
        self._busy = asyncio.Lock()

    async def running(self) -> list[Launched]:
        """All that run. Those that have ended by themselves are removed, with a word."""
        async with self._busy:
            try:
                self._known = await self._look()
            except HostError as error:
                if self._known is None:
                    raise
                if self._answers:
                    log.warning("%s; its instances count as they were", error)
                self._answers = False
            else:
                self._answers = True
            return list(self._known.values())

    async def launch(self, name: str, slot: Slot, spec: ContainerSpec) -> None:
        labels = {**self._labels, NAME: name, SLOT: ",".join(map(str, slot.gpus))}
        spec = replace(spec, labels={**spec.labels, **labels})
        async with self._busy:
            try:
                await self._host.run(f"{self._labels[CLUSTER]}-{name}", spec)
            except HostError:
                self._failed.add(name)
                raise
            except RefusedError as error:
                remedy = f"; build or pull {spec.image} there" * (error.status == NOT_FOUND)
                raise RefusedError(f"{error}{remedy}", error.status) from error
            self._failed.discard(name)
            self._known = {**(self._known or {}), name: Launched(name, slot)}

    async def wait(self, name: str) -> str | None:
        while (container := await self._find(name)) is not None:
            if container.has_ended:
                how, lines = await self._host.last_words(container.container_id, N_LAST_LINES)
                return f"{how}; {lines[-1]}" if lines else how
            await asyncio.sleep(WATCH_EVERY_S)
        return None

    async def stop(self, name: str, grace_s: float) -> None:
        waited_s, is_told = 0.0, False
        while (container := await self._find(name)) is not None:
            if container.has_ended and not is_told:
                await self._mourn(container)
            if container.has_ended or waited_s >= grace_s:
                await self._host.remove(container.container_id)
            elif not is_told:
                await self._host.signal(container.container_id, "SIGTERM")
                is_told = True
            await asyncio.sleep(LOOK_EVERY_S)
            waited_s += LOOK_EVERY_S
        if self._known is not None:
            self._known.pop(name, None)

    async def _find(self, name: str) -> Container | None:
        if self._known is not None and name not in self._known:
            return None
        async with self._busy:
            found = await self._host.containers({**self._labels, NAME: name})
        return found[0] if found else None

    async def _look(self) -> dict[str, Launched]:
        known = {}
        for container in await self._host.containers(self._labels):
            name = container.labels[NAME]
            if container.is_running and name not in self._failed:
                gpus = tuple(int(gpu) for gpu in container.labels[SLOT].split(","))
                known[name] = Launched(name, Slot(self._number, gpus))
                continue
            if container.has_ended:
                await self._mourn(container)
            await self._host.remove(container.container_id)
        return known

    async def _mourn(self, container: Container) -> None:
        """Its log goes with it, so say what matters."""
        how, lines = await self._host.last_words(container.container_id, N_LAST_LINES)
        name = container.labels[NAME]
        log.warning("%s on %s ended by itself: %s", name, self._host.name, how)
        for line in lines:
            log.warning("%s: %s", name, line)


async def _insist(work: Callable[[], Coroutine[object, object, T]]) -> T:
    """Until nothing is in its way."""
    while True:
        try:
            return await work()
        except (HostError, RefusedError) as error:
            log.warning("%s; trying again", error)
        await asyncio.sleep(ASK_AGAIN_S)


def gpu_spec(spec: ContainerSpec, slot: Slot) -> ContainerSpec:
    """An instance that gets its GPUs and no others; it counts them from 0."""
    return replace(spec, gpus=slot.gpus, environ={**spec.environ, **_degree(slot)})


def cpu_spec(spec: ContainerSpec, slot: Slot) -> ContainerSpec:
    """An instance with a core and a thread for each rank."""
    environ = {"DILASERVE_DEVICE": "cpu", "DILASERVE_THREADS": "1", **_degree(slot)}
    return replace(spec, cores=slot.gpus, environ={**spec.environ, **environ})


def _degree(slot: Slot) -> dict[str, str]:
    return {"DILASERVE_TP_DEGREE": str(slot.tp_degree)}
