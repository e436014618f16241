"""What runs, from three witnesses: the bus, the scheduler, and the supervisor's state file."""

from __future__ import annotations

import msgspec

from dilaserve.bus import Bus
from dilaserve.discovery import ServiceInfo, discover
from dilaserve.errors import BusUnavailableError
from dilaserve.messages import (
    InstanceStatus,
    RequestStatus,
    Status,
    StatusQuery,
    decode_reply,
    encode,
)
from dilaserve.subjects import STATUS
from dilaserve.supervisor.state import ChildState, StackState

__all__ = ["Process", "StatusReport", "merge_processes", "report"]

STATUS_TIMEOUT_S = 2.0


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process; `pid` is None where only its address is known."""

    service: str
    id: str
    pid: int | None
    address: str
    host: str = ""
    phase: str = "ready"
    n_restarts: int = 0


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture. `term` is None and the lists are empty where no scheduler answers."""

    gateway_url: str
    nats_url: str
    redis_url: str
    processes: list[Process]
    term: int | None
    instances: list[InstanceStatus]
    requests: list[RequestStatus]
    problems: list[str]


async def report(
    bus: Bus | None,
    stack: StackState | None,
    *,
    gateway_url: str,
    nats_url: str,
    redis_url: str,
    no_bus: str = "",
) -> StatusReport:
    """Ask everyone. `bus` is None where NATS does not answer, `no_bus` what is known of that."""
    found = await discover(bus) if bus is not None else []
    answer, problems = await _ask_scheduler(bus, stack, no_bus)
    return StatusReport(
        gateway_url=gateway_url,
        nats_url=nats_url,
        redis_url=redis_url,
        processes=merge_processes(found, stack),
        term=answer.term if answer is not None else None,
        instances=answer.instances if answer is not None else [],
        requests=answer.requests if answer is not None else [],
        problems=[*problems, *_troubled(stack)],
    )


def merge_processes(found: list[ServiceInfo], stack: StackState | None) -> list[Process]:
    """One row a process: those on the bus, and the children that are not (yet) on it."""
    children = {child.pid: child for child in stack.children} if stack is not None else {}
    on_bus = [_from_bus(info, children.get(info.pid)) for info in found]
    seen = {process.pid for process in on_bus}
    rest = [
        Process(
            service=child.service,
            id=child.name,
            pid=child.pid,
            address=child.address,
            phase=child.phase,
            n_restarts=child.n_restarts,
        )
        for child in (stack.children if stack is not None else [])
        if child.pid is None or child.pid not in seen
    ]
    return [*_supervisor(stack), *rest, *on_bus]


def _from_bus(info: ServiceInfo, child: ChildState | None) -> Process:
    return Process(
        service=info.name,
        id=info.metadata.get("id", info.id),
        pid=info.pid,
        address=info.metadata.get("address", ""),
        host=info.metadata.get("host", ""),
        phase=child.phase if child is not None else "ready",
        n_restarts=child.n_restarts if child is not None else 0,
    )


def _supervisor(stack: StackState | None) -> list[Process]:
    if stack is None:
        return []
    pid = stack.supervisor_pid
    return [Process(service="supervisor", id="supervisor", pid=pid, address="", phase=stack.phase)]


async def _ask_scheduler(
    bus: Bus | None, stack: StackState | None, no_bus: str
) -> tuple[Status | None, list[str]]:
    if bus is None:
        silent = "NATS does not answer, so only the supervisor's word is shown"
        return None, [no_bus if stack is None and no_bus else silent]
    try:
        answer = await bus.request(STATUS, encode(StatusQuery()), timeout_s=STATUS_TIMEOUT_S)
    except BusUnavailableError as error:
        return None, [f"no scheduler answers, so instances and requests are unknown ({error})"]
    status = decode_reply(answer.data)
    assert isinstance(status, Status)
    return status, []


def _troubled(stack: StackState | None) -> list[str]:
    return [
        f"{child.name} is {child.phase.replace('_', ' ')} after {child.n_restarts} restarts"
        for child in (stack.children if stack is not None else [])
        if child.phase in ("restarting", "given_up")
    ]
