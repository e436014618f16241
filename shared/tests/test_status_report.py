"""What `dilaserve status` knows when parts are missing."""

from __future__ import annotations

import pytest

from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.bus.memory import MemoryBus
from dilaserve.commands.status import as_lines
from dilaserve.discovery import discover
from dilaserve.messages import InstanceInfo, InstanceStatus, Status, encode
from dilaserve.status_report import StatusReport, report
from dilaserve.subjects import STATUS
from dilaserve.supervisor.state import ChildState, StackState

URLS = {"gateway_url": "http://g", "nats_url": "nats://n", "redis_url": "redis://r"}


def child(name: str, service: str, pid: int | None, **fields: object) -> ChildState:
    values: dict[str, object] = {"phase": "ready", "n_restarts": 0, **fields}
    return ChildState(name=name, service=service, pid=pid, **values)  # type: ignore[arg-type]


@pytest.fixture
def stack() -> StackState:
    return StackState(
        phase="ready",
        supervisor_pid=1,
        model="m",
        children=[
            child("nats", "nats", 2, address="127.0.0.1:4222"),
            child("scheduler", "scheduler", 3, n_restarts=2),
            child("worker-1", "gpu-worker", None, phase="restarting", n_restarts=1),
        ],
        **URLS,
    )


async def serve_scheduler(bus: Bus, *, pid: int) -> None:
    async def answer(_message: BusMessage) -> bytes:
        return encode(Status(term=7, instances=[], requests=[]))

    card = ServiceCard(
        name="scheduler",
        version="0.1.0",
        description="d",
        metadata={"id": "scheduler-1a2b", "pid": str(pid), "address": "a:1", "host": "h"},
    )
    await bus.serve(card, [Endpoint("status", STATUS, answer)])


async def test_processes_of_bus_and_supervisor_are_merged_by_pid(stack: StackState) -> None:
    bus = MemoryBus()
    await serve_scheduler(bus, pid=3)
    answer = await report(bus, stack, **URLS)
    assert [(p.service, p.id, p.pid, p.phase, p.n_restarts) for p in answer.processes] == [
        ("supervisor", "supervisor", 1, "ready", 0),
        ("nats", "nats", 2, "ready", 0),
        ("gpu-worker", "worker-1", None, "restarting", 1),
        ("scheduler", "scheduler-1a2b", 3, "ready", 2),
    ]
    assert answer.term == 7
    assert answer.problems == ["worker-1 is restarting after 1 restarts"]


async def test_dead_scheduler_is_said(stack: StackState) -> None:
    answer = await report(MemoryBus(), stack, **URLS)
    assert answer.term is None
    assert answer.problems[0].startswith("no scheduler answers")
    assert "! no scheduler answers" in "\n".join(as_lines(answer))


async def test_dead_bus_leaves_the_supervisors_word(stack: StackState) -> None:
    answer = await report(None, stack, **URLS)
    assert [p.service for p in answer.processes] == [
        "supervisor",
        "nats",
        "scheduler",
        "gpu-worker",
    ]
    assert answer.problems[0].startswith("NATS does not answer")


async def test_services_without_a_supervisor_are_found() -> None:
    bus = MemoryBus()
    await serve_scheduler(bus, pid=3)
    answer: StatusReport = await report(bus, None, **URLS)
    assert [(p.id, p.address, p.host) for p in answer.processes] == [("scheduler-1a2b", "a:1", "h")]


def test_people_see_degree_and_model_of_an_instance() -> None:
    info = InstanceInfo(
        instance_id="w-1a2b",
        name="w",
        model_id="llada",
        weights_hash="0",
        tp_degree=4,
        cache_mode="dual",
        block_length=32,
        max_batch_tokens=8192,
        n_kv_tokens=4096,
        max_sequence_length=4096,
        host="h",
        pid=9,
        device="cuda:0",
    )
    instance = InstanceStatus(
        info=info, state="live", n_requests=2, n_tokens=700, heartbeat_age_s=0.1
    )
    report = StatusReport(
        processes=[], term=1, instances=[instance], requests=[], problems=[], **URLS
    )
    head, row = (line for line in as_lines(report) if line)
    assert head.split() == ["INSTANCE", "STATE", "REQUESTS", "TOKENS", "TP", "DEVICE", "MODEL"]
    assert row.split() == ["w-1a2b", "live", "2", "700", "4", "cuda:0", "llada"]


async def test_discovery_by_service_name() -> None:
    bus = MemoryBus()
    await serve_scheduler(bus, pid=3)
    assert [info.pid for info in await discover(bus, "scheduler", wait_s=0.05)] == [3]
    assert await discover(bus, "gateway", wait_s=0.05) == []
