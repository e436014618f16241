"""The scheduler's service over a bus and a store in memory, with a scripted worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.crashpoints import CrashPoint, CrashPoints
from dilaserve.discovery import discover
from dilaserve.errors import BusTimeoutError
from dilaserve.messages import (
    Admitted,
    Refused,
    Status,
    StatusQuery,
    decode_reply,
    encode,
)
from dilaserve.plan_messages import Drain, Drained, NotDrained, decode_drained
from dilaserve.process import Identity
from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve.telemetry import Telemetry
from dilaserve_scheduler.core import Core, CoreSettings
from dilaserve_scheduler.lease import LeaseLostError
from dilaserve_scheduler.policies import PolicyOptions, build_policy
from dilaserve_scheduler.service import Clocks, SchedulerService

from .fakes import cancel, running_worker, submit, wait_ended, write


def build_core(term: int) -> Core:
    settings = CoreSettings(dead_after_s=0.5, gap_s=0.2, resend_after_s=0.2, reconcile_every_s=0.3)
    return Core(build_policy("infaas", PolicyOptions()), settings, term=term)


def build_service(bus: Bus, store: Store, name: str = "scheduler-1", **changes: Any) -> Any:
    options: dict[str, Any] = {
        "build_core": build_core,
        "telemetry": Telemetry.for_tests("scheduler"),
        "clocks": Clocks(time.monotonic, time.time, time.perf_counter),
        "lease_ttl_s": 0.6,
    }
    return SchedulerService(bus, store, Identity(name, 1, "here"), **(options | changes))


@asynccontextmanager
async def running(
    bus: Bus, store: Store, name: str = "scheduler-1", **changes: Any
) -> AsyncIterator[asyncio.Task[None]]:
    """A service that leads (or, with `wait=False`, may stand by) until the end of the block."""
    wait = changes.pop("wait", True)
    service = build_service(bus, store, name, **changes)
    task = asyncio.create_task(service.run())
    try:
        if wait:
            await leading(bus, name, task)
        yield task
    finally:
        service.stop("test")
        with suppress(LeaseLostError, asyncio.CancelledError):
            await asyncio.wait_for(task, 5.0)


async def leading(bus: Bus, name: str, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(5.0):
        while not task.done():
            infos = await discover(bus, "scheduler", wait_s=0.05)
            if any(i.id == name and i.metadata["role"] == "leader" for i in infos):
                return
    await task


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def bus(broker: MemoryBroker) -> MemoryBus:
    return MemoryBus(broker)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def status(bus: Bus) -> Status:
    answer = await bus.request(subjects.STATUS, encode(StatusQuery()), timeout_s=2.0)
    reply = decode_reply(answer.data)
    assert isinstance(reply, Status)
    return reply


async def test_a_request_is_served(bus: MemoryBus, store: MemoryStore) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001"):
        await write(store, "r", arrival_s=time.time())
        assert isinstance(await submit(bus, "r"), Admitted)
        assert await wait_ended(store, "r") == "done"
        report = await status(bus)
        assert [(i.info.instance_id, i.state) for i in report.instances] == [("a-0001", "live")]


async def test_many_requests_are_served_side_by_side(bus: MemoryBus, store: MemoryStore) -> None:
    names = [f"r{n}" for n in range(40)]
    async with (
        running(bus, store),
        running_worker(bus, store, "a-0001"),
        running_worker(bus, store, "b-0001"),
    ):
        for name in names:
            await write(store, name, arrival_s=time.time())
        replies = await asyncio.gather(*(submit(bus, name) for name in names))
        assert {type(reply) for reply in replies} == {Admitted}
        assert {await wait_ended(store, name) for name in names} == {"done"}
        records = await store.load(names)
        assert {record.owner for record in records if record} == {"a-0001", "b-0001"}


async def test_refusals_reach_the_gateway(bus: MemoryBus, store: MemoryStore) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001"):
        reply = await submit(bus, "never-written")
        assert isinstance(reply, Refused)
        assert reply.code == "unknown"


async def test_a_cancelled_request_is_released(bus: MemoryBus, store: MemoryStore) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as worker:
        worker.step_s = 60.0
        await write(store, "r", arrival_s=time.time())
        await submit(bus, "r")
        await store.cancel("r", reason="left")
        assert (await cancel(bus, "r")).known
        assert not (await cancel(bus, "r")).known
        await until(lambda: bool(worker.commands and worker.commands[-1].releases))


async def test_the_dead_workers_requests_go_on_elsewhere(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as dying:
        dying.step_s = 60.0
        await write(store, "r", arrival_s=time.time())
        await submit(bus, "r")
        await until(lambda: bool(dying.items))
        dying.mute = True
        async with running_worker(bus, store, "b-0001"):
            assert await wait_ended(store, "r") == "done"
        (record,) = await store.load(["r"])
        assert record is not None
        assert (record.owner, record.epoch, record.attempts) == ("b-0001", 2, 1)


async def test_a_new_scheduler_takes_over(bus: MemoryBus, store: MemoryStore) -> None:
    async with running_worker(bus, store, "a-0001") as worker:
        worker.step_s = 0.2
        async with running(bus, store):
            await write(store, "r", arrival_s=time.time())
            await submit(bus, "r")
        async with running(bus, store, "scheduler-2"):
            assert (await status(bus)).term == 2
            assert await wait_ended(store, "r") == "done"
        assert worker.commands[-1].term == 2
    (record,) = await store.load(["r"])
    assert record is not None
    assert (record.epoch, record.attempts) == (1, 0)


async def test_a_standby_answers_nobody_and_then_leads(
    bus: MemoryBus, store: MemoryStore, broker: MemoryBroker
) -> None:
    other = MemoryBus(broker)
    async with running(bus, store), running(other, store, "scheduler-2", wait=False) as standby:
        await asyncio.sleep(0.05)
        infos = await discover(bus, "scheduler", wait_s=0.1)
        assert {i.id: i.metadata["role"] for i in infos} == {
            "scheduler-1": "leader",
            "scheduler-2": "standby",
        }
        assert {(await status(bus)).term for _ in range(4)} == {1}
        await store.release_lease("scheduler-1", term=1)  # as if it had been frozen for long
        await leading(bus, "scheduler-2", standby)
        assert await store.take_lease("x", ttl_s=1.0) is None


async def test_a_lost_lease_ends_the_service(bus: MemoryBus, store: MemoryStore) -> None:
    async with running(bus, store) as task:
        await store.release_lease("scheduler-1", term=1)
        assert await store.take_lease("other", ttl_s=60.0) == 2
        with pytest.raises(LeaseLostError):
            await asyncio.wait_for(task, 5.0)


async def test_a_lease_that_ran_out_is_taken_again_and_work_goes_on(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as worker:
        await store.release_lease("scheduler-1", term=1)
        async with asyncio.timeout(5.0):
            while (await status(bus)).term != 2:
                await asyncio.sleep(0.05)
        await write(store, "r", arrival_s=time.time())
        await submit(bus, "r")
        assert await wait_ended(store, "r") == "done"
        assert worker.commands[-1].term == 2


async def test_an_unavailable_store_only_delays(bus: MemoryBus, store: MemoryStore) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as worker:
        await write(store, "r", arrival_s=time.time())
        worker.step_s = 60.0  # the fake one does not bear it
        await asyncio.sleep(0.05)
        store.down = True
        asked = asyncio.create_task(submit(bus, "r"))
        await asyncio.sleep(0.5)
        assert not asked.done()
        store.down = False
        assert isinstance(await asked, Admitted)


async def test_a_lost_answer_of_the_store_is_asked_for_again(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001"):
        await write(store, "r", arrival_s=time.time())
        await asyncio.sleep(0.05)
        original = store.admit
        lost: list[bool] = []

        async def admit(*args: Any, **kwargs: Any) -> Any:
            if not lost:
                lost.append(True)
                store.lose_answers = 1
            return await original(*args, **kwargs)

        store.admit = admit  # type: ignore[method-assign]
        assert isinstance(await submit(bus, "r"), Admitted)
        assert lost
        assert await wait_ended(store, "r") == "done"
        (record,) = await store.load(["r"])
        assert record is not None
        assert record.epoch == 1


async def test_a_store_that_does_not_come_back_is_said_to_be_unavailable(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running(bus, store, submit_timeout_s=0.3), running_worker(bus, store, "a-0001") as w:
        w.step_s = 60.0
        await asyncio.sleep(0.1)
        store.down = True
        reply = await submit(bus, "r")
        assert isinstance(reply, Refused)
        assert (reply.code, reply.retry_after_s) == ("unavailable", 1.0)
        store.down = False


async def test_a_store_under_another_run_id_has_all_epochs_raised(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as worker:
        worker.step_s = 60.0
        await write(store, "r", arrival_s=time.time())
        await submit(bus, "r")
        store.restore(store.snapshot())
        await until(lambda: bool(worker.items) and worker.items["r"].epoch == 2, timeout_s=5.0)


async def test_garbage_is_counted_and_dropped(bus: MemoryBus, store: MemoryStore) -> None:
    telemetry = Telemetry.for_tests("scheduler")
    async with running(bus, store, telemetry=telemetry), running_worker(bus, store, "a-0001"):
        await bus.publish(subjects.event_step("nobody"), b'{"type": "news"}')
        await bus.publish(subjects.event_step("nobody"), b"not even json")
        for subject in (subjects.REQUEST_SUBMIT, subjects.REQUEST_CANCEL):
            for data in (b"{}", encode(StatusQuery())):
                await bus.request(subject, data, timeout_s=2.0)
        counted = 'dilaserve:messages_dropped_total{reason="invalid"} 6.0'
        await until(lambda: counted in telemetry.render()[0].decode())
        await write(store, "r", arrival_s=time.time())
        await submit(bus, "r")
        assert await wait_ended(store, "r") == "done"


class KilledError(Exception):
    """What a crash point does in these tests."""


class Crashing(CrashPoints):
    """Raises at a point instead of killing the process."""

    def __init__(self, point: CrashPoint) -> None:
        super().__init__()
        self._point = point

    def reach(self, name: CrashPoint) -> None:
        if name == self._point:
            raise KilledError(name)


async def test_it_can_be_killed_after_admit_and_before_the_command(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running_worker(bus, store, "a-0001") as worker:
        task = await killed(bus, store, "scheduler.after_admit")
        with pytest.raises(KilledError):
            await asyncio.wait_for(task, 5.0)
        (record,) = await store.load(["r"])
        assert record is not None
        assert (record.epoch, record.owner) == (1, "a-0001")
        assert worker.commands == []
        async with running(bus, store, "scheduler-2"):
            assert await wait_ended(store, "r") == "done"


async def test_it_can_be_killed_after_reassign_and_before_the_command(
    bus: MemoryBus, store: MemoryStore
) -> None:
    async with running_worker(bus, store, "a-0001") as first:
        first.step_s = 60.0
        task = await killed(bus, store, "scheduler.after_reassign")
        await until(lambda: bool(first.items))
        async with running_worker(bus, store, "a-0002") as second:
            with pytest.raises(KilledError):
                await asyncio.wait_for(task, 5.0)
            (record,) = await store.load(["r"])
            assert record is not None
            assert (record.epoch, record.owner) == (2, "a-0002")
            assert second.commands == []
            first.mute = True
            async with running(bus, store, "scheduler-2"):
                assert await wait_ended(store, "r") == "done"


async def killed(bus: Bus, store: Store, point: CrashPoint) -> asyncio.Task[None]:
    """A service that dies at `point`, and request r submitted to it."""
    service = build_service(bus, store, crash=Crashing(point))
    task: asyncio.Task[None] = asyncio.create_task(service.run())
    await leading(bus, "scheduler-1", task)
    await write(store, "r", arrival_s=time.time())
    with suppress(BusTimeoutError):
        await submit(bus, "r", timeout_s=0.5)
    return task


async def until(condition: Any, *, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_an_instance_gets_empty_and_the_planner_is_told(bus: Bus, store: Store) -> None:
    async with running(bus, store), running_worker(bus, store, "a-0001") as first:
        first.step_s = 0.1
        await write(store, "r", arrival_s=time.time())
        assert isinstance(await submit(bus, "r"), Admitted)
        async with running_worker(bus, store, "b-0001"):
            n_left = [await drain(bus, "a-0001")]
            assert n_left == [1]
            async with asyncio.timeout(5.0):
                while n_left[-1]:
                    await asyncio.sleep(0.02)
                    n_left.append(await drain(bus, "a-0001"))
            assert await wait_ended(store, "r") == "done"
            await write(store, "s", arrival_s=time.time())
            await submit(bus, "s")
            assert await wait_ended(store, "s") == "done"
            owners = {d.worker for d in await store.deltas("s")}
            assert owners == {"b-0001"}
            states = {i.info.instance_id: i.state for i in (await status(bus)).instances}
            assert states == {"a-0001": "draining", "b-0001": "live"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [(encode(Drain(instance_id="z-0001")), "dilaserve status"), (b"{}", "plan_messages.Drain")],
)
async def test_what_cannot_be_drained_is_answered_with_a_remedy(
    bus: Bus, store: Store, data: bytes, reason: str
) -> None:
    async with running(bus, store):
        answer = decode_drained((await bus.request(subjects.DRAIN, data, timeout_s=5.0)).data)
        assert isinstance(answer, NotDrained)
        assert reason in answer.reason


async def drain(bus: Bus, instance_id: str) -> int:
    data = encode(Drain(instance_id=instance_id))
    answer = decode_drained((await bus.request(subjects.DRAIN, data, timeout_s=5.0)).data)
    assert isinstance(answer, Drained)
    return answer.n_left
