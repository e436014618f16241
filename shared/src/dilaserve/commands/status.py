"""`dilaserve status`: processes, instances and requests of a stack, dead parts included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import msgspec
import typer

from dilaserve.addresses import find_addresses, stack_home
from dilaserve.bus import Bus
from dilaserve.commands.connect import bus_of_stack
from dilaserve.commands.options import AsJson, NatsUrl
from dilaserve.errors import BusUnavailableError
from dilaserve.status_report import StatusReport, report
from dilaserve.supervisor.state import running_state


def status(as_json: AsJson = False, nats_url: NatsUrl = None) -> None:
    """Show processes, instances and requests."""
    answer = asyncio.run(_report(nats_url))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        typer.echo("\n".join(as_lines(answer)))
    if not answer.processes:
        raise typer.Exit(1)


def as_lines(answer: StatusReport) -> list[str]:
    """The report for people."""
    processes = [
        (p.service, p.id, str(p.pid or "-"), p.phase, str(p.n_restarts), p.address or "-")
        for p in answer.processes
    ]
    instances = [
        (
            i.info.instance_id,
            i.state,
            str(i.n_requests),
            str(i.n_tokens),
            str(i.info.tp_degree),
            i.info.device,
            i.info.model_id,
        )
        for i in answer.instances
    ]
    requests = [
        (
            r.request_id,
            r.state,
            r.instance_id or "-",
            str(r.epoch),
            str(r.step),
            f"{r.n_unmasked}/{r.n_output}",
            f"{r.threshold:.2f}",
        )
        for r in answer.requests
    ]
    addresses = f"gateway {answer.gateway_url}   nats {answer.nats_url}   redis {answer.redis_url}"
    gap = "\n" if answer.processes else ""
    return [
        *([addresses] if answer.processes else []),
        *_table("SERVICE ID PID PHASE RESTARTS ADDRESS", processes),
        *_table("INSTANCE STATE REQUESTS TOKENS TP DEVICE MODEL", instances),
        *_table("REQUEST STATE INSTANCE EPOCH STEP TOKENS THRESHOLD", requests),
        *(f"{gap}! {problem}" for problem in answer.problems),
    ]


async def _report(nats_url: str | None) -> StatusReport:
    try:
        async with bus_of_stack(nats_url, name="status") as bus:
            return await _report_of(bus, nats_url)
    except BusUnavailableError as error:
        return await _report_of(None, nats_url, no_bus=str(error))


async def _report_of(bus: Bus | None, nats_url: str | None, *, no_bus: str = "") -> StatusReport:
    addresses = find_addresses(os.environ)
    return await report(
        bus,
        running_state(stack_home(os.environ)),
        gateway_url=addresses.gateway_url,
        nats_url=nats_url or addresses.nats_url,
        redis_url=addresses.redis_url,
        no_bus=no_bus,
    )


def _table(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """An empty line, the head and the rows in columns; nothing where there are no rows."""
    if not rows:
        return []
    lines = [head.split(), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return ["", *(line.rstrip() for line in padded)]
