"""A worker service over the memory bus and store, with an engine that needs no tensors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest

from dilaserve import subjects
from dilaserve.bus import BusMessage
from dilaserve.bus.memory import MemoryBroker, MemoryBus
from dilaserve.crashpoints import CrashPoints
from dilaserve.messages import (
    CommitOutcome,
    ConfidenceStats,
    Heartbeat,
    InstanceDown,
    InstanceInfo,
    InstanceUp,
    Rejected,
    Release,
    StepCommand,
    StepItem,
    StepItemResult,
    StepResult,
    TokenDelta,
    decode_to_gateway,
    decode_worker_event,
    encode,
)
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import (
    MASKED,
    Commit,
    DecodingSpec,
    NewRequest,
    RequestRecord,
    ServiceLevel,
)
from dilaserve.telemetry import Telemetry
from dilaserve_gpu_worker.engine.types import (
    BatchOutput,
    Credit,
    EngineRequest,
    StepOutput,
)
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.host.loop import EngineLoop, Orders
from dilaserve_gpu_worker.host.orders import Lost, Order, Ping, Pong, Report
from dilaserve_gpu_worker.host.port import EnginePort
from dilaserve_gpu_worker.service import WorkerService

BLOCK = 4
N_KV_TOKENS = 1000
ME = "worker-00aa"
STATS = ConfidenceStats(min=0.9, q25=0.9, median=0.9, mean=0.9, q75=0.9)


@dataclass(slots=True)
class Scripted:
    request: EngineRequest
    canvas: list[int]
    step: int
    credit: Credit

    @property
    def block(self) -> int:
        masked = [i for i, token in enumerate(self.canvas) if token == MASKED]
        return (masked[0] if masked else len(self.canvas) - 1) // BLOCK


class ScriptedEngine:
    """Unmasks one token a step, from left to right; the token tells position and threshold."""

    limits = Limits(
        vocab_size=1 << 20,
        max_sequence_length=N_KV_TOKENS,
        max_batch_tokens=8192,
        n_kv_tokens=N_KV_TOKENS,
    )

    def __init__(self) -> None:
        self.held: dict[str, Scripted] = {}
        self.added: list[EngineRequest] = []
        self.n_begun = 0
        self.n_passes = 0
        self.recompute_tokens: int | None = None
        self.passing = threading.Event()
        """Clear it, and the next forward pass does not end."""
        self.passing.set()

    @property
    def n_free_kv_tokens(self) -> int:
        return N_KV_TOKENS - sum(len(s.request.prompt) + len(s.canvas) for s in self.held.values())

    def add(self, request: EngineRequest) -> None:
        assert request.request_id not in self.held
        self.added.append(request)
        self.held[request.request_id] = Scripted(
            request, list(request.canvas), request.step, request.credit
        )

    def set_credit(self, request_id: str, credit: Credit) -> None:
        self.held[request_id].credit = credit

    def limit_recomputes(self, n_tokens: int | None) -> None:
        self.recompute_tokens = n_tokens

    def remove(self, request_id: str) -> None:
        del self.held[request_id]

    def plan(self) -> list[Scripted] | None:
        return [s for s in self.held.values() if _may_run(s)] or None

    def forward(self, plan: list[Scripted]) -> list[int]:
        self.n_begun += 1
        assert self.passing.wait(30)
        self.n_passes += 1
        return [int(s.credit.threshold * 100) * 1000 + s.canvas.index(MASKED) for s in plan]

    def unmask(self, plan: list[Scripted], logits: list[int]) -> BatchOutput:
        steps = [_unmask(s, token) for s, token in zip(plan, logits, strict=True)]
        return BatchOutput(latency_s=0.001, n_tokens=BLOCK * len(plan), n_rebuilds=0, steps=steps)


def _may_run(s: Scripted) -> bool:
    limit = s.credit.until_step
    return (
        MASKED in s.canvas and s.block <= s.credit.until_block and (limit is None or s.step < limit)
    )


def _unmask(s: Scripted, token: int) -> StepOutput:
    position, block = s.canvas.index(MASKED), s.block
    s.canvas[position] = token
    s.step += 1
    return StepOutput(
        request_id=s.request.request_id,
        step=s.step,
        block=block,
        kind="cache" if position % BLOCK else "recompute",
        threshold=s.credit.threshold,
        positions=[position],
        tokens=[token],
        confidences=[0.9],
        stats=STATS,
        n_unmasked=sum(t != MASKED for t in s.canvas),
        n_block_masked=sum(t == MASKED for t in s.canvas[block * BLOCK : (block + 1) * BLOCK]),
        finish_reason=None if MASKED in s.canvas else "length",
    )


def hosted(engine: Any, crash: CrashPoints) -> EnginePort:
    """The engine in a thread of its own, which ends with its orders."""
    orders: Orders = SimpleQueue()
    loop = asyncio.get_running_loop()

    def send(given: Sequence[Order] | Ping) -> None:
        if isinstance(given, Ping):
            port.heard(Pong())
        else:
            orders.put(given)

    port = EnginePort(engine.limits, send)

    def say(report: Report) -> None:
        with suppress(RuntimeError):  # the test has ended
            loop.call_soon_threadsafe(port.heard, report)

    engine_loop = EngineLoop(engine, orders, say, crash)
    engine_loop.warm_up(BLOCK)

    def run() -> None:
        try:
            engine_loop.run()
        except (RuntimeError, SystemError) as error:
            say(Lost(reason=str(error)))

    threading.Thread(target=run, daemon=True).start()
    return port


class SlowStore(MemoryStore):
    """A store that can be made to hold its answers to commits, or to loads, back, and keeps the
    questions."""

    def __init__(self) -> None:
        super().__init__()
        self.answering = asyncio.Event()
        self.answering.set()
        self.loading = asyncio.Event()
        self.loading.set()
        self.asked: list[Commit] = []
        self.n_loads = 0

    async def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        self.asked.extend(commits)
        await self.answering.wait()
        return await super().commit(commits)

    async def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        self.n_loads += 1
        await self.loading.wait()
        return await super().load(request_ids)


def instance(instance_id: str) -> InstanceInfo:
    return InstanceInfo(
        instance_id=instance_id,
        name=instance_id.rpartition("-")[0],
        model_id="tiny",
        weights_hash="0123456789abcdef",
        tp_degree=1,
        cache_mode="dual",
        block_length=BLOCK,
        max_batch_tokens=8192,
        n_kv_tokens=N_KV_TOKENS,
        max_sequence_length=N_KV_TOKENS,
        host="here",
        pid=1,
    )


@dataclass
class Rig:
    """What a test sees: the scheduler's and the gateway's ends of the bus, engine and store."""

    instance_id: str = ME
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    store: SlowStore = field(default_factory=SlowStore)
    engine: Any = field(default_factory=ScriptedEngine)
    telemetry: Telemetry = field(default_factory=lambda: Telemetry.for_tests("gpu-worker"))
    deltas: list[TokenDelta] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    seq: int = 0
    term: int = 1

    def __post_init__(self) -> None:
        self.bus = MemoryBus(self.broker)
        self.worker_bus = MemoryBus(self.broker)

    async def listen(self) -> None:
        def on_event(message: BusMessage) -> None:
            self.events.append(decode_worker_event(message.data))

        def on_delta(message: BusMessage) -> None:
            self.deltas.append(decode_to_gateway(message.data))

        await self.bus.subscribe(f"dlm.v1.evt.{self.instance_id}.>", on_event)
        await self.bus.subscribe(subjects.tokens("gw-1"), on_delta)

    def build(self, crash: CrashPoints | None = None, **options: Any) -> WorkerService:
        crash = crash or CrashPoints()
        return WorkerService(
            hosted(self.engine, crash),
            self.worker_bus,
            self.store,
            instance(self.instance_id),
            telemetry=self.telemetry,
            clock=time.perf_counter,
            crash=crash,
            **{"heartbeat_s": 0.02, "stop_timeout_s": 0.1} | options,
        )

    async def new(self, request_id: str, *, n_output: int = 4, owner: str = "", **of: Any) -> None:
        """Store a request and admit it to this instance (or `owner`) with epoch 1."""
        given = {
            "prompt": [1, 2, 3],
            "spec": DecodingSpec(n_output=n_output, block_length=BLOCK, seed=7),
            "model_id": "tiny",
            "gateway_id": "gw-1",
            "arrival_s": 0.0,
        }
        request = NewRequest(request_id=request_id, level=ServiceLevel(), **given | of)
        assert await self.store.new(request)
        await self.store.admit(request_id, term=self.term, owner=owner or self.instance_id)

    async def command(
        self,
        *items: StepItem,
        releases: Sequence[Release] = (),
        term: int | None = None,
        seq: int | None = None,
        recompute_tokens: int | None = None,
    ) -> None:
        """Send a StepCommand, by default with the next sequence number."""
        self.seq = self.seq + 1 if seq is None else seq
        command = StepCommand(
            term=self.term if term is None else term,
            seq=self.seq,
            items=list(items),
            releases=list(releases),
            recompute_tokens=recompute_tokens,
        )
        await self.bus.publish(subjects.command_step(self.instance_id), encode(command))

    async def credit(
        self,
        request_id: str,
        *,
        epoch: int = 1,
        threshold: float = 0.9,
        until_block: int = 99,
        until_step: int | None = None,
        traceparent: str = "",
    ) -> None:
        """Command one item."""
        await self.command(
            StepItem(
                request_id=request_id,
                epoch=epoch,
                threshold=threshold,
                until_block=until_block,
                until_step=until_step,
                traceparent=traceparent,
            )
        )

    async def record(self, request_id: str) -> RequestRecord:
        record = (await MemoryStore.load(self.store, [request_id]))[0]
        assert record is not None
        return record

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait for something that happens; a test that waits in vain fails."""
        try:
            async with asyncio.timeout(5):
                while not condition():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pytest.fail(f"never happened: {what or condition}")

    async def quiet(self) -> None:
        """Give the service the time to do what it should not do, two heartbeats long."""
        n_beats = len(self.heartbeats)
        await self.until(lambda: len(self.heartbeats) >= n_beats + 2, "two heartbeats")

    @property
    def results(self) -> list[StepResult]:
        return [event for event in self.events if isinstance(event, StepResult)]

    @property
    def items(self) -> list[StepItemResult]:
        return [item for result in self.results for item in result.items]

    @property
    def rejected(self) -> list[Rejected]:
        return [item for result in self.results for item in result.rejected]

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return [event for event in self.events if isinstance(event, Heartbeat)]

    @property
    def ups(self) -> list[InstanceUp]:
        return [event for event in self.events if isinstance(event, InstanceUp)]

    @property
    def downs(self) -> list[InstanceDown]:
        return [event for event in self.events if isinstance(event, InstanceDown)]

    def held(self) -> dict[str, tuple[int, int]]:
        """Epoch and committed step of each request that the last heartbeat lists."""
        return {h.request_id: (h.epoch, h.step) for h in self.heartbeats[-1].holds}

    def steps(self, request_id: str) -> list[int]:
        """Steps of the deltas that the gateway got."""
        return [delta.step for delta in self.deltas if delta.request_id == request_id]

    def metric(self, name: str, **labels: str) -> float:
        """A counter's value, 0 when it was never counted."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.telemetry.render()[0].decode().splitlines()
        found = [line for line in lines if line.startswith(name) and all(w in line for w in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)


@asynccontextmanager
async def serving(rig: Rig, **options: Any) -> AsyncIterator[WorkerService]:
    """Run the service until the block ends; it must end by itself, and cleanly."""
    service = rig.build(**options)
    running = asyncio.create_task(service.run())
    try:
        await rig.until(lambda: rig.heartbeats or running.done(), "the first heartbeat")
        yield service
    finally:
        if isinstance(rig.engine, ScriptedEngine):
            rig.engine.passing.set()
        service.stop("test ends")
        await asyncio.wait_for(running, 5)


@pytest.fixture
async def make_rig() -> AsyncIterator[Callable[..., Any]]:
    """Make rigs, started unless `started=False`; keyword arguments go to Rig."""
    async with AsyncExitStack() as stack:

        async def make(started: bool = True, options: Any = None, **of: Any) -> Rig:
            rig = Rig(**of)
            await rig.listen()
            stack.callback(rig.telemetry.close)
            if started:
                await stack.enter_async_context(serving(rig, **options or {}))
            return rig

        yield make


@pytest.fixture
async def rig(make_rig: Callable[..., Any]) -> Rig:
    """A started service that holds nothing."""
    rig: Rig = await make_rig()
    rig.engine.added.clear()
    rig.engine.n_begun = rig.engine.n_passes = 0
    return rig
