"""Keeps the cluster at the mix that is wanted: after a plan, after a death, and after a crash of
its own. What is wanted is on disk before anything is done about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dilaserve_reconfigurator import stage2
from dilaserve_reconfigurator.executor import Executor, Report
from dilaserve_reconfigurator.planner import Cluster
from dilaserve_reconfigurator.record import mix_text
from dilaserve_reconfigurator.snapshot import PlanningError
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.spare import fits
from dilaserve_reconfigurator.stage2 import Placed, Transition

__all__ = ["Keeper"]

SOLVE_S = 20.0
END_S = 60.0

log = logging.getLogger(__name__)


_Counts = dict[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0)]]
"""Instances by TP degree."""


class _Wanted(msgspec.Struct, frozen=True):
    counts: _Counts
    before: _Counts | None = None
    """What ran before the plan that is under way; what to go back to if it has to be given up."""


class Keeper:
    """`initial` is what is wanted where nothing was wanted before. Raises PlanningError where
    that is more than the nodes have room for, or cannot be read."""

    def __init__(
        self, executor: Executor, nodes: Sequence[int], folder: Path, initial: Mapping[int, int]
    ) -> None:
        self._executor = executor
        self._nodes = tuple(nodes)
        self._path = folder / "wanted.json"
        earlier = self._read()
        self._wanted = earlier or _Wanted(dict(initial))
        if not fits(self._nodes, _positive(self._wanted.counts)):
            remedy = "correct DILASERVE_NODES, or "
            remedy += f"remove {self._path}" if earlier else "DILASERVE_INITIAL_MIX"
            raise PlanningError(f"{self._no_room(self._wanted.counts)}; {remedy}")

    async def cluster(self) -> Cluster:
        """What runs, and where."""
        return Cluster(self._nodes, await self._executor.running())

    async def end(self, name: str) -> None:
        """End an instance that serves no more; `keep` then replaces it. Raises LaunchError, and
        TimeoutError where its host does not answer."""
        async with asyncio.timeout(END_S):
            await self._executor.end(name)

    async def keep(self) -> Report | None:
        """Bring about what is wanted. None if it is there. A plan that was under way when the
        process died is finished by this. One that has to be given up is undone; one that was cut
        short by a death is finished by the next call."""
        running = await self._executor.running()
        wanted = self._wanted
        if _counts(running) == _positive(wanted.counts):
            self._want(_Wanted(wanted.counts))
            return None
        log.info("%s runs, %s is wanted", *map(mix_text, (_counts(running), wanted.counts)))
        self._executor.at("wanted")
        transition = await asyncio.to_thread(self._transition, running)
        report = await self._executor.execute(transition)
        if report.phase == "done":
            self._want(_Wanted(wanted.counts))
        elif report.phase == "given_up" and wanted.before is not None:
            self._want(_Wanted(wanted.before))
            await self.keep()  # what the execution could not undo, since it died in between
        return report

    async def change_to(self, counts: Mapping[int, int]) -> Report | None:
        """Want another mix from now on, and bring it about."""
        running = _counts(await self._executor.running())
        self._want(_Wanted(dict(counts), before=running))
        return await self.keep()

    def _transition(self, running: Sequence[Placed]) -> Transition:
        wanted = {**dict.fromkeys(_counts(running), 0), **self._wanted.counts}
        model = stage2.build_model(self._nodes, running, wanted)
        if not solve(model, SOLVE_S).has_solution:
            raise PlanningError(self._no_room(wanted))
        return stage2.read_plan(model)

    def _no_room(self, counts: Mapping[int, int]) -> str:
        return f"{mix_text(counts)} does not fit on nodes of {list(self._nodes)} GPUs"

    def _want(self, wanted: _Wanted) -> None:
        if wanted == self._wanted and self._path.exists():
            return
        self._wanted = wanted
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(wanted))
        unfinished.replace(self._path)

    def _read(self) -> _Wanted | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Wanted)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PlanningError(f"{self._path} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise PlanningError(f"{self._path} is malformed: {error}; remove it") from error


def _counts(running: Sequence[Placed]) -> dict[int, int]:
    degrees = [placed.slot.tp_degree for placed in running]
    return {degree: degrees.count(degree) for degree in sorted(set(degrees))}


def _positive(counts: Mapping[int, int]) -> dict[int, int]:
    return {degree: n for degree, n in sorted(counts.items()) if n}
