"""The worker as a process, over real NATS and Valkey: serves, dies, is replaced, ends cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from dilaserve import subjects
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import start_nats, start_valkey
from dilaserve.messages import (
    Heartbeat,
    InstanceDown,
    InstanceUp,
    StepCommand,
    StepItem,
    StopCommand,
    decode_to_gateway,
    decode_worker_event,
    encode,
)
from dilaserve.store.records import MASKED, DecodingSpec, NewRequest, ServiceLevel
from dilaserve.store.redis import connect_redis
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.weights import load_model

SPEC = DecodingSpec(n_output=48, block_length=16, seed=3, temperature=1.0)
PROMPT = [7, 8, 9]


class Cluster:
    """NATS, Valkey, and the test as scheduler and gateway."""

    def __init__(self, bus, store, valkey, env) -> None:
        self.bus, self.store, self.env = bus, store, env
        self.valkey = valkey
        self.events: list = []
        self.deltas: list = []

    async def listen(self) -> None:
        await self.bus.subscribe(
            subjects.ALL_WORKER_EVENTS, lambda m: self.events.append(decode_worker_event(m.data))
        )
        await self.bus.subscribe(
            subjects.tokens("gw-1"), lambda m: self.deltas.append(decode_to_gateway(m.data))
        )

    @asynccontextmanager
    async def worker(self, **env):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dilaserve_gpu_worker"),
            env=self.env | env,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def joined(self, name: str) -> InstanceUp:
        ups = [e for e in self.events if isinstance(e, InstanceUp) and e.info.name == name]
        while not ups:
            await asyncio.sleep(0.02)
            ups = [e for e in self.events if isinstance(e, InstanceUp) and e.info.name == name]
        return ups[-1]

    async def until_beats(self, condition: Callable[[int], bool], *, within_s: float) -> None:
        """Wait for a time of `within_s` whose number of heartbeats is as wanted."""
        n_new = n_beats = -1
        while n_beats < 0 or not condition(n_new):
            n_beats = sum(isinstance(event, Heartbeat) for event in self.events)
            await asyncio.sleep(within_s)
            n_new = sum(isinstance(event, Heartbeat) for event in self.events) - n_beats

    async def submit(self, request_id: str, owner: str) -> None:
        request = NewRequest(
            request_id=request_id,
            model_id="random",
            prompt=PROMPT,
            spec=SPEC,
            level=ServiceLevel(),
            gateway_id="gw-1",
            arrival_s=0.0,
        )
        await self.store.new(request)
        await self.store.admit(request_id, term=1, owner=owner)
        await self.credit(request_id, owner, epoch=1)

    async def credit(self, request_id: str, owner: str, *, epoch: int) -> None:
        item = StepItem(request_id=request_id, epoch=epoch, threshold=0.7, until_block=99)
        command = StepCommand(term=1, seq=epoch, items=[item])
        await self.bus.publish(subjects.command_step(owner), encode(command))

    async def done(self, request_id: str) -> list[int]:
        while True:
            (record,) = await self.store.load([request_id])
            if record.state == "done":
                return record.canvas
            await asyncio.sleep(0.02)


async def child_of(pid: int, module: str) -> psutil.Process:
    """The child that runs `module`, as soon as it does."""
    while True:
        for child in psutil.Process(pid).children():
            if module in child.cmdline():
                return child
        await asyncio.sleep(0.01)


@pytest.fixture
async def cluster(make_folder):
    async with start_nats() as nats, start_valkey() as valkey:
        bus = await connect_nats(nats.url, name="test")
        store = await connect_redis(valkey.url)
        env = os.environ | {
            "DILASERVE_NATS_URL": nats.url,
            "DILASERVE_REDIS_URL": valkey.url,
            "DILASERVE_MODEL": str(make_folder()),
            "DILASERVE_MODEL_NAME": "random",
            "DILASERVE_WORKER_NAME": "w1",
            "DILASERVE_KV_TOKENS": "4096",
            "OMP_NUM_THREADS": "1",
        }
        cluster = Cluster(bus, store, valkey, env)
        await cluster.listen()
        yield cluster
        await bus.close()
        await store.close()


@pytest.fixture
def expected(model) -> list[int]:
    """The text of the bare engine."""
    return bare_text(model)


def bare_text(model) -> list[int]:
    engine = Engine(model, cache_mode="dual", n_kv_tokens=4096, max_batch_tokens=512)
    engine.add(EngineRequest("r", PROMPT, SPEC, 0, [MASKED] * SPEC.n_output, Credit(0.7, 99)))
    while engine.step():
        pass
    return engine.canvas("r")


@pytest.mark.parametrize("how", ["SIGTERM", "stop command"])
async def test_it_serves_and_ends_cleanly(cluster, expected, how):
    async with cluster.worker() as process:
        info = (await cluster.joined("w1")).info
        await cluster.submit("r", info.instance_id)
        assert await cluster.done("r") == expected
        assert info.pid == process.pid
        assert (info.n_kv_tokens, info.tp_degree, info.cache_mode) == (4096, 1, "dual")
        answers = await cluster.bus.request_many("$SRV.PING.gpu-worker", b"", wait_s=0.2)
        assert len(answers) == 1
        assert info.instance_id.encode() in answers[0].data
        if how == "stop command":
            stop = encode(StopCommand(reason="scale down"))
            await cluster.bus.publish(subjects.command_stop(info.instance_id), stop)
        else:
            process.send_signal(signal.Signals[how])
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, log.decode()
    text = [MASKED] * SPEC.n_output
    for delta in cluster.deltas:
        for position, token in zip(delta.positions, delta.tokens, strict=True):
            text[position] = token
    assert text == expected
    downs = [event for event in cluster.events if isinstance(event, InstanceDown)]
    assert [down.reason for down in downs] == ["scale down" if how == "stop command" else how]


@pytest.mark.parametrize(
    ("crash_at", "n_steps"), [("worker.command_in_flight:1", 0), ("worker.after_commit:3", 3)]
)
async def test_another_worker_ends_what_a_killed_one_began(cluster, expected, crash_at, n_steps):
    async with (
        cluster.worker(DILASERVE_CRASH_AT=crash_at) as process,
        cluster.worker(DILASERVE_WORKER_NAME="w2"),
    ):
        first = (await cluster.joined("w1")).info.instance_id
        second = (await cluster.joined("w2")).info.instance_id
        await cluster.submit("r", first)
        assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL
        answer = await cluster.store.reassign(
            "r", term=1, owner=second, expected_epoch=1, owner_died=True
        )
        assert answer.step == n_steps
        await cluster.credit("r", second, epoch=2)
        assert await cluster.done("r") == expected


async def test_an_engine_that_is_killed_takes_its_instance_down(cluster, expected):
    async with (
        cluster.worker() as process,
        cluster.worker(DILASERVE_WORKER_NAME="w2"),
    ):
        first = (await cluster.joined("w1")).info.instance_id
        second = (await cluster.joined("w2")).info.instance_id
        await cluster.submit("r", first)
        while not cluster.deltas:
            await asyncio.sleep(0.001)
        [engine] = psutil.Process(process.pid).children()
        engine.kill()
        _, log = await asyncio.wait_for(process.communicate(), 15)
        assert process.returncode == 1
        assert b"the engine's process has ended (exit code -9; " in log
        assert b"Traceback" not in log
        downs = [event for event in cluster.events if isinstance(event, InstanceDown)]
        assert [down.instance_id for down in downs] == [first]
        await cluster.store.reassign("r", term=1, owner=second, expected_epoch=1)
        await cluster.credit("r", second, epoch=2)
        assert await cluster.done("r") == expected


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
async def test_an_engine_ends_with_its_instance(cluster, how):
    async with cluster.worker() as process:
        await cluster.joined("w1")
        [engine] = psutil.Process(process.pid).children()
        engine.send_signal(signal.SIGTERM)  # as to a whole container: its parent's business
        process.send_signal(signal.Signals[how])
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == (0 if how == "SIGTERM" else -signal.SIGKILL), log.decode()
        engine.wait(5)


async def test_an_instance_beats_only_while_its_engine_runs(cluster, expected):
    """So that a scheduler moves what an engine holds that was stopped, as if all had been."""
    async with cluster.worker(DILASERVE_HEARTBEAT_MS="50") as process:
        info = (await cluster.joined("w1")).info
        [engine] = psutil.Process(process.pid).children()
        engine.suspend()
        await cluster.until_beats(lambda n_new: n_new == 0, within_s=0.5)
        engine.resume()
        await cluster.until_beats(lambda n_new: n_new > 2, within_s=0.5)
        await cluster.submit("r", info.instance_id)
        assert await cluster.done("r") == expected
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, log.decode()
    assert b"the engine's process does not answer" in log
    assert b"the engine's process is back" in log


@pytest.mark.parametrize("heartbeat_ms", ["50", "20000"])
async def test_a_stop_does_not_wait_for_ever_for_an_engine_that_hangs(cluster, heartbeat_ms):
    env = {"DILASERVE_HEARTBEAT_MS": heartbeat_ms, "DILASERVE_STOP_TIMEOUT_S": "0.5"}
    async with cluster.worker(**env) as process:
        await cluster.joined("w1")
        [engine] = psutil.Process(process.pid).children()
        engine.suspend()
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, log.decode()
        engine.wait(5)
    assert [event.reason for event in cluster.events if isinstance(event, InstanceDown)] == [
        "SIGTERM"
    ]


async def test_a_stop_is_over_before_a_store_that_hangs_has_timed_out(cluster):
    """Whoever kills what does not end within 10 s must not have to."""
    async with cluster.worker(DILASERVE_STOP_TIMEOUT_S="0.5") as process:
        info = (await cluster.joined("w1")).info
        await cluster.submit("r", info.instance_id)
        while not cluster.deltas:
            await asyncio.sleep(0.001)
        cluster.valkey.send_signal(signal.SIGSTOP)
        process.terminate()
        try:
            _, log = await asyncio.wait_for(process.communicate(), 4)
        finally:
            cluster.valkey.send_signal(signal.SIGCONT)
        assert process.returncode == 0, log.decode()


async def test_a_signal_to_all_while_the_model_loads_is_the_parents_business(cluster):
    async with cluster.worker() as process:
        engine = await child_of(process.pid, "dilaserve_gpu_worker.host")
        engine.send_signal(signal.SIGINT)
        engine.send_signal(signal.SIGTERM)
        await cluster.joined("w1")
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, log.decode()


async def test_a_stop_while_the_model_loads_is_clean(cluster):
    async with cluster.worker() as process:
        while not psutil.Process(process.pid).children():
            await asyncio.sleep(0.01)
        [engine] = psutil.Process(process.pid).children()
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, log.decode()
        engine.wait(5)


async def test_a_stop_while_waiting_for_nats_is_clean(cluster):
    async with cluster.worker(DILASERVE_NATS_URL="nats://127.0.0.1:9") as process:
        first = await asyncio.wait_for(process.stderr.readline(), 30)
        assert b"random on cpu, tensor parallelism 1, cache dual, attention sdpa" in first
        assert b"CUDA graphs off (the device is cpu), torch.compile off" in first
        assert b"torch.compile off, type float32, products " in first
        assert b", plan policy blockserve, " in first
        line = await asyncio.wait_for(process.stderr.readline(), 30)
        assert b"waiting for NATS" in line
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0, log.decode()


async def test_a_lost_rank_takes_its_instance_down_and_its_requests_go_on(cluster, make_folder):
    """A tensor-parallel instance of two ranks, and one of one rank that takes over."""
    folder = str(make_folder(vocab_size=64))
    async with (
        cluster.worker(DILASERVE_TP_DEGREE="2", DILASERVE_MODEL=folder) as process,
        cluster.worker(DILASERVE_WORKER_NAME="w2", DILASERVE_MODEL=folder),
    ):
        info = (await cluster.joined("w1")).info
        other = (await cluster.joined("w2")).info
        assert (info.tp_degree, info.n_kv_tokens) == (2, 4096)
        await cluster.submit("r", info.instance_id)
        while not cluster.deltas:
            await asyncio.sleep(0.001)
        [engine] = psutil.Process(process.pid).children()
        [rank] = engine.children()
        rank.kill()
        _, log = await asyncio.wait_for(process.communicate(), 15)
        assert process.returncode == 1
        assert b"of the tensor-parallel group" in log
        assert b"Traceback" not in log
        downs = [e for e in cluster.events if isinstance(e, InstanceDown)]
        assert [down.instance_id for down in downs] == [info.instance_id]
        await cluster.store.reassign("r", term=1, owner=other.instance_id, expected_epoch=1)
        await cluster.credit("r", other.instance_id, epoch=2)
        text = await cluster.done("r")
    assert text == bare_text(load_model(Path(folder)))


async def test_an_instance_beats_only_while_its_ranks_run(cluster, make_folder):
    """It is idle: no collective could tell."""
    folder = str(make_folder(vocab_size=64))
    env = {"DILASERVE_TP_DEGREE": "2", "DILASERVE_MODEL": folder, "DILASERVE_HEARTBEAT_MS": "50"}
    async with cluster.worker(**env) as process:
        info = (await cluster.joined("w1")).info
        [engine] = psutil.Process(process.pid).children()
        [rank] = engine.children()
        rank.suspend()
        await cluster.until_beats(lambda n_new: n_new == 0, within_s=0.5)
        rank.resume()
        await cluster.until_beats(lambda n_new: n_new > 2, within_s=0.5)
        await cluster.submit("r", info.instance_id)
        assert await cluster.done("r") == bare_text(load_model(Path(folder)))


async def test_a_rank_that_is_lost_while_it_loads_is_named(cluster, make_folder):
    folder = str(make_folder(vocab_size=64))
    async with cluster.worker(DILASERVE_TP_DEGREE="2", DILASERVE_MODEL=folder) as process:
        engine = await child_of(process.pid, "dilaserve_gpu_worker.host")
        (await child_of(engine.pid, "dilaserve_gpu_worker.parallel.follower")).kill()
        _, log = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        [line] = log.decode().splitlines()
        assert "rank 1 of the tensor-parallel group has ended (exit code -9)" in line


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
async def test_the_ranks_end_with_their_instance(cluster, make_folder, how):
    folder = str(make_folder(vocab_size=64))
    async with cluster.worker(DILASERVE_TP_DEGREE="2", DILASERVE_MODEL=folder) as process:
        await cluster.joined("w1")
        [engine] = psutil.Process(process.pid).children()
        [rank] = engine.children()
        process.send_signal(signal.Signals[how])
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == (0 if how == "SIGTERM" else -signal.SIGKILL), log.decode()
        rank.wait(5)
