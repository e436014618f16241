"""A live cluster whose workers a keeper owns, constant load on it, and what is to hold of both."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import free_port, start_nats, start_valkey
from dilaserve.messages import Heartbeat, InstanceDown, InstanceUp, decode_worker_event
from dilaserve.store.records import Delta
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import Stack, running_stack
from dilaserve_bench.tiny.tasks import LONG_CHAINS, held_out_problem
from dilaserve_reconfigurator.draining import BusDrainer
from dilaserve_reconfigurator.execution import Patience
from dilaserve_reconfigurator.executor import Executor, Report
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ
from dilaserve_reconfigurator.members import Members

from .streams import MODEL, Streamed, load_deltas, stream_one

N_CLIENTS = 3
LENGTHS = (32, 256, 32, 128, 32, 256)
"""Short and long: one block to eight."""
N_DATA = 32
"""Of the problems; the rest of a canvas is whatever the model makes of it."""
TIE = 1e-5
"""Nearer than this, another degree's sums may decide otherwise (DESIGN, determinism)."""


@dataclass
class Floor:
    """GPUs that serve, by what instances say of themselves."""

    serving: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many serve from then on."""

    def receive(self, message: BusMessage) -> None:
        event = decode_worker_event(message.data)
        if isinstance(event, InstanceUp | Heartbeat):
            self.serving[event.info.instance_id] = event.info.tp_degree
        elif isinstance(event, InstanceDown):
            self.serving.pop(event.instance_id, None)
        self.changes.append((time.monotonic(), sum(self.serving.values())))

    def below_s(self, floor: int, since: float) -> float:
        """Seconds since then in which fewer served."""
        later = [*self.changes[1:], (time.monotonic(), 0)]
        return sum(
            max(end - max(begin, since), 0.0)
            for (begin, n_gpus), (end, _) in zip(self.changes, later, strict=True)
            if n_gpus < floor
        )


@dataclass(frozen=True, slots=True)
class Live:
    """The stack, who owns its workers, and who counts them."""

    stack: Stack
    keeper: Keeper
    floor: Floor


@asynccontextmanager
async def live_cluster(
    folder: Path, *, slots: int, floor: int, drain_s: float
) -> AsyncIterator[Live]:
    """All services, and a keeper of so many slots with TP-1 in each; ended with the context."""
    async with start_nats() as nats, start_valkey() as valkey:
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DILASERVE_DEAD_AFTER_S": "30",  # eight workers on two cores may be late
            "DILASERVE_NATS_URL": nats.url,
            "DILASERVE_REDIS_URL": valkey.url,
            "DILASERVE_MODEL": str(MODEL),
        }
        options = StackOptions(
            home=folder,
            model=MODEL,
            port=free_port(),
            n_workers=0,
            threads=1,
            policy="infaas",
            nats_url=nats.url,
            redis_url=valkey.url,
        )
        bus = await connect_nats(nats.url, name="keeper")
        watched = Floor()
        await bus.subscribe(subjects.ALL_WORKER_EVENTS, watched.receive)
        launcher = ProcessLauncher(
            folder / "instances",
            [sys.executable, "-m", "dilaserve_gpu_worker"],
            environ=environ,
            environ_of=cpu_environ,
        )
        try:
            keeper = Keeper(
                await _executor(bus, launcher, slots, floor, drain_s),
                [slots],
                folder / "instances",
                {1: slots},
            )
            launching = asyncio.create_task(keeper.keep())
            async with running_stack(options, environ=environ, log=print_line) as stack:
                report = await launching
                assert report is not None
                assert report.phase == "done", report
                yield Live(stack, keeper, watched)
        finally:
            for launched in await launcher.running():
                await launcher.stop(launched.name)
            await bus.close()


async def _executor(
    bus: Bus, launcher: ProcessLauncher, slots: int, floor: int, drain_s: float
) -> Executor:
    members, names = Members((slots,)), itertools.count(1)

    def receive(message: BusMessage) -> None:
        event = decode_worker_event(message.data)
        if isinstance(event, InstanceUp | Heartbeat):
            members.heard(time.monotonic(), event.info)
        elif isinstance(event, InstanceDown):
            members.left(event.instance_id)

    def id_of(name: str) -> str | None:
        return members.id_of(time.monotonic(), name)

    async def served_by(name: str) -> None:
        while id_of(name) is None:
            await asyncio.sleep(0.05)

    await bus.subscribe(subjects.ALL_WORKER_EVENTS, receive)
    return Executor(
        launcher,
        BusDrainer(bus, id_of, hold_s=30.0),
        served_by=served_by,
        new_name=lambda: f"slot-{next(names)}",
        clock=time.monotonic,
        patience=Patience(drain_s=drain_s, launch_s=180.0),
        nodes=[slots],
        floor=floor,
    )


def body(index: int) -> dict[str, object]:
    """A request whose text, at a fixed threshold, depends on nothing."""
    length = LENGTHS[index % len(LENGTHS)]
    problem = held_out_problem("total" if index % 2 else "walk", N_DATA, 11, index, LONG_CHAINS)
    return {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": problem.prompt}],
        "max_tokens": length,
        "temperature": 0.0,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Load:
    """Clients that ask one after the other, each the same few things over and over."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.answers: list[tuple[int, Streamed]] = []
        """Which of `LENGTHS`' requests, and what came of it."""

    async def once(self) -> list[list[Delta]]:
        """Each request alone, and the steps that it took."""
        async with self._client() as client:
            streams = [await stream_one(client, body(i)) for i in range(len(LENGTHS))]
        return await load_deltas(self._live.stack, streams)

    @asynccontextmanager
    async def constant(self) -> AsyncIterator[None]:
        """As long as the block runs. Raises AssertionError for the first request that fails."""
        done = asyncio.Event()
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            for number in range(N_CLIENTS):
                tasks.create_task(self._ask(client, number, done))
            try:
                yield
            finally:
                done.set()

    def _client(self) -> httpx.AsyncClient:
        url = self._live.stack.endpoints.gateway_url
        return httpx.AsyncClient(base_url=url, timeout=300)

    async def _ask(self, client: httpx.AsyncClient, number: int, done: asyncio.Event) -> None:
        for index in itertools.count(number):
            if done.is_set():
                return
            which = index % len(LENGTHS)
            self.answers.append((which, await stream_one(client, body(which))))


@dataclass(frozen=True, slots=True)
class Checked:
    """Of so many requests so many moved, and so many have a text decided by a tie."""

    n_requests: int
    n_moved: int
    n_ties: int


async def check_texts(live: Live, load: Load, reference: Sequence[Sequence[Delta]]) -> Checked:
    """All of them are the undisturbed run's, but for those that differ first where two degrees may.
    And no committed token changed."""
    histories = await load_deltas(live.stack, [stream for _, stream in load.answers])
    n_ties = n_moved = 0
    for (which, _), deltas in zip(load.answers, histories, strict=True):
        canvas: dict[int, int] = {}
        for delta in deltas:
            for position, token in zip(delta.positions, delta.tokens, strict=True):
                assert canvas.setdefault(position, token) == token, "a committed token changed"
        assert sorted(canvas) == list(range(LENGTHS[which]))
        n_ties += differs_by_a_tie(deltas, reference[which])
        n_moved += deltas[-1].epoch > 1
    return Checked(len(load.answers), n_moved, n_ties)


def differs_by_a_tie(ours: Sequence[Delta], theirs: Sequence[Delta]) -> bool:
    """False for equal courses. Raises AssertionError where the first difference is no tie."""
    for a, b in zip(ours, theirs, strict=False):
        one = {p: (t, c) for p, t, c in zip(a.positions, a.tokens, a.confidences, strict=True)}
        two = {p: (t, c) for p, t, c in zip(b.positions, b.tokens, b.confidences, strict=True)}
        if {p: t for p, (t, _) in one.items()} == {p: t for p, (t, _) in two.items()}:
            continue
        for position in one.keys() & two.keys():
            if one[position][0] != two[position][0]:
                assert abs(one[position][1] - two[position][1]) <= TIE, (a, b)
        for position in one.keys() ^ two.keys():
            confidence = (one.get(position) or two[position])[1]
            best = max(c for _, c in [*one.values(), *two.values()])
            assert min(abs(confidence - a.threshold), abs(confidence - best)) <= TIE, (a, b)
        return True
    assert len(ours) == len(theirs)
    return False


async def change(live: Live, mix: dict[int, int]) -> Report:
    """To another mix, all the way."""
    report = await live.keeper.change_to(mix)
    assert report is not None
    assert (report.phase, report.reason) == ("done", "")
    said = f"{report.seconds:.1f} s, at least {report.lowest} GPUs, pause {report.pause_s:.1f} s"
    print_line("keeper", f"{mix}: {said}")
    return report


def print_line(name: str, line: str) -> None:
    """Pytest shows it when a test fails, or with -s."""
    print(f"{name}: {line}")
