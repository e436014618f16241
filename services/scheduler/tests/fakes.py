"""A scripted worker and a gateway's few words, over any bus and store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage
from dilaserve.messages import (
    Admitted,
    Cancel,
    Cancelled,
    Heartbeat,
    Held,
    InstanceUp,
    Message,
    Refused,
    StepCommand,
    StepItem,
    StepItemResult,
    StepResult,
    Submit,
    decode_reply,
    decode_to_worker,
    encode,
)
from dilaserve.store import Store
from dilaserve.store.records import MASKED, Commit, DecodingSpec, NewRequest, ServiceLevel

from .driver import BLOCK, MODEL, STATS, info


@dataclass
class FakeWorker:
    """Unmasks one block a step, the position as its token. Silent while `mute`."""

    bus: Bus
    store: Store
    instance_id: str
    mute: bool = False
    items: dict[str, StepItem] = field(default_factory=dict)
    commands: list[StepCommand] = field(default_factory=list)
    step_s: float = 0.01

    async def say(self, subject: str, message: Message) -> None:
        if not self.mute:
            await self.bus.publish(subject, encode(message))

    def receive(self, message: BusMessage) -> None:
        command = decode_to_worker(message.data)
        assert isinstance(command, StepCommand)
        self.commands.append(command)
        self.items |= {item.request_id: item for item in command.items}
        for release in command.releases:
            if release.request_id in self.items:
                del self.items[release.request_id]

    async def beat(self) -> None:
        await self.say(subjects.event_up(self.instance_id), InstanceUp(info=info(self.instance_id)))
        while True:
            last = self.commands[-1] if self.commands else StepCommand(term=0, seq=0)
            heartbeat = Heartbeat(
                info=info(self.instance_id),
                term=last.term,
                seq=last.seq,
                n_free_kv_tokens=0,
                holds=[
                    Held(request_id=i.request_id, epoch=i.epoch, step=0)
                    for i in self.items.values()
                ],
            )
            await self.say(subjects.event_heartbeat(self.instance_id), heartbeat)
            await asyncio.sleep(0.05)

    async def work(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            results = [r for i in list(self.items.values()) if (r := await self.step(i))]
            if results:
                await self.say(
                    subjects.event_step(self.instance_id),
                    StepResult(
                        instance_id=self.instance_id,
                        batch=1,
                        latency_ms=10.0,
                        n_tokens=32,
                        items=results,
                    ),
                )

    async def step(self, item: StepItem) -> StepItemResult | None:
        (record,) = await self.store.load([item.request_id])
        if self.mute or record is None or MASKED not in record.canvas:
            return None
        block = record.canvas.index(MASKED) // BLOCK
        if block > item.until_block:
            return None
        positions = [
            p
            for p, token in enumerate(record.canvas)
            if token == MASKED and block * BLOCK <= p < (block + 1) * BLOCK
        ]
        n_unmasked = len(record.canvas) - record.canvas.count(MASKED) + len(positions)
        reason = "length" if n_unmasked == len(record.canvas) else None
        (outcome,) = await self.store.commit(
            [
                Commit(
                    request_id=item.request_id,
                    epoch=item.epoch,
                    step=record.step + 1,
                    block=block,
                    kind="recompute",
                    threshold=item.threshold,
                    worker=self.instance_id,
                    latency_ms=1.0,
                    positions=positions,
                    tokens=positions,
                    confidences=[0.5] * len(positions),
                    stats=STATS,
                    finish_reason=reason,  # type: ignore[arg-type]
                )
            ]
        )
        if reason or outcome not in ("committed", "duplicate"):
            self.items.pop(item.request_id, None)
        return StepItemResult(
            request_id=item.request_id,
            epoch=item.epoch,
            step=record.step + 1,
            block=block,
            kind="recompute",
            threshold=item.threshold,
            outcome=outcome,
            n_new=len(positions),
            n_unmasked=n_unmasked,
            n_block_masked=0,
            confidence=STATS,
            finish_reason=reason,  # type: ignore[arg-type]
        )


@asynccontextmanager
async def running_worker(bus: Bus, store: Store, instance_id: str) -> AsyncIterator[FakeWorker]:
    """A worker that joins, beats and works; gone without a word at the end."""
    worker = FakeWorker(bus, store, instance_id)
    listening = await bus.subscribe(subjects.command_step(instance_id), worker.receive)
    tasks = [asyncio.create_task(worker.beat()), asyncio.create_task(worker.work())]
    try:
        yield worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.unsubscribe()


async def write(store: Store, request_id: str, *, arrival_s: float, traceparent: str = "") -> None:
    """A record of 8 + 24 tokens, as a gateway writes it."""
    await store.new(
        NewRequest(
            request_id=request_id,
            model_id=MODEL,
            prompt=[1] * 8,
            spec=DecodingSpec(n_output=24, block_length=BLOCK, seed=1),
            level=ServiceLevel(),
            gateway_id="g",
            arrival_s=arrival_s,
            traceparent=traceparent,
        )
    )


async def submit(
    bus: Bus,
    request_id: str,
    *,
    arrival_s: float = 0.0,
    timeout_s: float = 5.0,
    headers: dict[str, str] | None = None,
) -> Admitted | Refused:
    """Ask for its admission."""
    message = Submit(
        request_id=request_id,
        model_id=MODEL,
        n_prompt=8,
        n_output=24,
        block_length=BLOCK,
        arrival_s=arrival_s,
    )
    answer = await bus.request(
        subjects.REQUEST_SUBMIT, encode(message), timeout_s=timeout_s, headers=headers
    )
    reply = decode_reply(answer.data)
    assert isinstance(reply, Admitted | Refused)
    return reply


async def cancel(bus: Bus, request_id: str) -> Cancelled:
    """Tell the scheduler that nobody wants it any more."""
    data = encode(Cancel(request_id=request_id))
    reply = decode_reply((await bus.request(subjects.REQUEST_CANCEL, data, timeout_s=5.0)).data)
    assert isinstance(reply, Cancelled)
    return reply


async def wait_ended(store: Store, request_id: str, *, timeout_s: float = 15.0) -> str:
    """The final state of a record."""
    async with asyncio.timeout(timeout_s):
        while True:
            (record,) = await store.load([request_id])
            if record is not None and record.state in ("done", "failed", "cancelled"):
                return record.state
            await asyncio.sleep(0.02)
