"""The service on a bus: what it hears, what it proposes, what it keeps; and its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage
from dilaserve.bus.memory import MemoryBus
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import start_nats
from dilaserve.messages import Heartbeat, InstanceDown, Submit, encode
from dilaserve.plan_messages import PlanApplied, PlanProposed, decode_plan
from dilaserve.process import Identity
from dilaserve.telemetry import Telemetry
from dilaserve_reconfigurator import service as service_module
from dilaserve_reconfigurator.execution import Patience
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.members import Members
from dilaserve_reconfigurator.monitor import Monitor
from dilaserve_reconfigurator.record import Plans
from dilaserve_reconfigurator.service import Clocks, ReconfiguratorService
from dilaserve_reconfigurator.silence import Silence

from .test_executor import Drains, MemoryLauncher, executor
from .test_members import info
from .test_planner import PROFILES, planner


@dataclass
class Time:
    """Goes on when told."""

    now: float = 1000.0


@dataclass
class Setting:
    """A service on a bus, and what it has published."""

    service: ReconfiguratorService
    bus: Bus
    time: Time
    plans: Plans
    proposed: list[PlanProposed] = field(default_factory=list)
    applied: list[PlanApplied] = field(default_factory=list)

    async def hear(self, *, seconds: int, per_second: int, instances: int = 8) -> None:
        """So many seconds of heartbeats and submissions."""
        for _ in range(seconds):
            self.time.now += 1.0
            for number in range(instances):
                heartbeat = Heartbeat(info=info(f"w{number}"), term=1, seq=1, n_free_kv_tokens=0)
                await self.bus.publish(subjects.event_heartbeat(f"w{number}"), encode(heartbeat))
            for number in range(per_second):
                await self.bus.publish(
                    subjects.REQUEST_SUBMIT, encode(submit(f"r{self.time.now}-{number}"))
                )
            await asyncio.sleep(0.001)


def submit(request_id: str) -> Submit:
    return Submit(
        request_id=request_id,
        model_id="m",
        n_prompt=64,
        n_output=64,
        block_length=32,
        arrival_s=0.0,
        slo_ms=5000,
    )


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry.for_tests("reconfigurator")
    yield telemetry
    telemetry.close()


@asynccontextmanager
async def serving(
    bus: Bus,
    folder: Path,
    telemetry: Telemetry,
    *,
    every_s: float = 3600.0,
    keeper: Keeper | None = None,
    silence: Silence | None = None,
) -> AsyncIterator[Setting]:
    clock = Time()
    plans = Plans(folder)
    service = ReconfiguratorService(
        bus,
        planner(),
        Monitor(window_s=60.0),
        Members((4, 4)),
        plans,
        Identity("reconfigurator-0000", 1, "here"),
        telemetry=telemetry,
        clocks=Clocks(lambda: clock.now, lambda: 7.0),
        every_s=every_s,
        measure_s=20.0,
        keeper=keeper,
        silence=silence,
    )
    setting = Setting(service, bus, clock, plans)

    def receive(message: BusMessage) -> None:
        said = decode_plan(message.data)
        if isinstance(said, PlanProposed):
            setting.proposed.append(said)
        else:
            setting.applied.append(said)

    await bus.subscribe(subjects.PLAN_PROPOSED, receive)
    await bus.subscribe(subjects.PLAN_APPLIED, receive)
    task = asyncio.create_task(service.run())
    async with asyncio.timeout(5):
        while not await bus.request_many("$SRV.PING.reconfigurator", b"", wait_s=0.02):
            await asyncio.sleep(0)
    try:
        yield setting
    finally:
        service.stop("the test has ended")
        async with asyncio.timeout(5):
            await task


def shown(telemetry: Telemetry) -> str:
    return telemetry.render()[0].decode()


async def test_proposes_what_suits_the_load_that_it_overheard(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry) as setting:
        await setting.hear(seconds=20, per_second=1, instances=4)
        record = await setting.service.propose()
        await asyncio.sleep(0.01)
    assert record is not None
    assert record.verdict == "change"
    assert record.target.counts == {1: 0, 2: 0, 4: 2}
    assert record.inputs is not None
    assert [(c.n_prompt, c.n_output, c.slo_s) for c in record.inputs.classes] == [(64, 64, 5.0)]
    assert record.inputs.classes[0].rate == pytest.approx(20 / 19, rel=0.05)
    assert setting.plans.load(record.plan_id) == record
    [proposal] = setting.proposed
    assert (proposal.plan_id, proposal.verdict) == (record.plan_id, "change")
    assert proposal.target.counts == {"1": 0, "2": 0, "4": 2}
    assert proposal.reasons == record.reasons
    text = shown(telemetry)
    assert 'dilaserve:plans_total{verdict="change"} 1.0' in text
    assert 'dilaserve:plan_objective{objective="mean_threshold"} 0.9' in text
    assert 'dilaserve:plan_gap{objective="slo_share"}' in text
    assert "dilaserve:plan_seconds_count 1.0" in text


async def test_holds_and_says_so_when_nothing_is_heard(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry) as setting:
        record = await setting.service.propose()
        await asyncio.sleep(0.01)
    assert record is not None
    assert (record.verdict, record.reasons) == (
        "hold",
        ["held: nothing has been heard of the cluster lately"],
    )
    assert [proposal.verdict for proposal in setting.proposed] == ["hold"]


async def test_instance_that_left_is_not_planned_with(tmp_path: Path, telemetry: Telemetry) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry) as setting:
        await setting.hear(seconds=20, per_second=1, instances=3)
        down = InstanceDown(instance_id="w2", reason="told to")
        await setting.bus.publish(subjects.event_down("w2"), encode(down))
        await asyncio.sleep(0.01)
        record = await setting.service.propose()
    assert record is not None
    assert record.present.counts == {1: 2, 2: 0, 4: 0}


async def test_cluster_that_does_not_fit_its_nodes_is_held(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry) as setting:
        await setting.hear(seconds=20, per_second=1, instances=6)
        record = await setting.service.propose()
    assert record is not None
    assert record.reasons == ["held: host a runs 6 GPUs' worth, has 4 GPUs"]


async def test_nonsense_is_dropped_and_counted(tmp_path: Path, telemetry: Telemetry) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry) as setting:
        await setting.bus.publish(subjects.event_heartbeat("w1"), b"{")
        await setting.bus.publish(subjects.REQUEST_SUBMIT, b"{")
        await setting.hear(seconds=20, per_second=1, instances=4)
        assert await setting.service.propose() is not None
    assert 'dilaserve:messages_dropped_total{reason="invalid"} 1.0' in shown(telemetry)


async def test_proposes_every_so_often(tmp_path: Path, telemetry: Telemetry) -> None:
    async with serving(MemoryBus(), tmp_path, telemetry, every_s=0.05) as setting:
        async with asyncio.timeout(10):
            while len(setting.proposed) < 2:
                await asyncio.sleep(0.02)
    assert len(setting.plans.ids()) >= 2


async def test_plan_that_cannot_be_kept_is_no_reason_to_end(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    (tmp_path / "file").write_text("in the way")
    async with serving(MemoryBus(), tmp_path / "file", telemetry) as setting:
        assert await setting.service.propose() is None
        assert await setting.service.propose() is None
    assert 'dilaserve:plans_total{verdict="failed"} 2.0' in shown(telemetry)


async def test_plan_is_carried_out_and_told(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_EVERY_S", 0.02)
    launcher = MemoryLauncher([4, 4], {1: 0})
    keeper = Keeper(executor(launcher, Drains()), [4, 4], tmp_path / "instances", {1: 8})
    async with serving(MemoryBus(), tmp_path, telemetry, every_s=30.0, keeper=keeper) as setting:
        async with asyncio.timeout(10):
            while launcher.counts() != {1: 8, 2: 0, 4: 0}:
                await asyncio.sleep(0.01)
        await setting.hear(seconds=40, per_second=1)
        async with asyncio.timeout(10):
            while not setting.applied:
                await asyncio.sleep(0.01)
    assert launcher.counts() == {1: 0, 2: 0, 4: 2}
    [applied] = setting.applied
    assert applied.counts == {"4": 2}
    assert applied.reason == ""
    assert applied.plan_id in {proposal.plan_id for proposal in setting.proposed}
    record = setting.plans.load(applied.plan_id)
    assert record.carried_out is not None
    assert (record.carried_out.phase, record.carried_out.lowest) == ("done", 4)
    assert 'dilaserve:plans_applied_total{outcome="done"} 1.0' in shown(telemetry)


async def test_effect_of_a_plan_is_measured_a_while_after_it(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_EVERY_S", 0.02)
    launcher = MemoryLauncher([4, 4], {1: 8})
    keeper = Keeper(executor(launcher, Drains()), [4, 4], tmp_path / "instances", {1: 8})
    async with serving(MemoryBus(), tmp_path, telemetry, every_s=40.0, keeper=keeper) as setting:
        await setting.hear(seconds=45, per_second=1)
        async with asyncio.timeout(10):
            while not setting.applied:
                await asyncio.sleep(0.01)
        plan_id = setting.applied[0].plan_id
        record = setting.plans.load(plan_id)
        assert record.after is None
        assert record.before is not None
        assert record.before.attainment == 0.0, "nobody ever served these"
        await setting.hear(seconds=25, per_second=3)
        async with asyncio.timeout(10):
            while (after := setting.plans.load(plan_id).after) is None:
                await asyncio.sleep(0.01)
    assert after.rate == pytest.approx(3.0, rel=0.2)


async def test_plan_that_fails_is_told_with_its_reason_and_undone(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_EVERY_S", 0.02)
    launcher = MemoryLauncher([4, 4], {1: 8})
    launcher.failing = {4}
    keeper = Keeper(executor(launcher, Drains()), [4, 4], tmp_path / "instances", {1: 8})
    async with serving(MemoryBus(), tmp_path, telemetry, every_s=30.0, keeper=keeper) as setting:
        await setting.hear(seconds=40, per_second=1)
        async with asyncio.timeout(10):
            while not setting.applied:
                await asyncio.sleep(0.01)
    assert "out of memory" in setting.applied[0].reason
    record = setting.plans.load(setting.applied[0].plan_id)
    assert record.carried_out is not None
    assert record.carried_out.phase == "given_up"
    assert record.carried_out.pause_s > 0.0 or record.carried_out.lowest > 0
    assert launcher.counts() == {1: 8, 2: 0, 4: 0}


async def test_instance_that_runs_and_is_not_heard_is_replaced(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_EVERY_S", 0.01)
    launcher = MemoryLauncher([4, 4], {1: 8})
    keeper = Keeper(executor(launcher, Drains()), [4, 4], tmp_path / "instances", {1: 8})
    silence = Silence(5.0, 1000.0)
    silence.heard("i3")
    async with serving(MemoryBus(), tmp_path, telemetry, keeper=keeper, silence=silence) as setting:
        async with asyncio.timeout(10):
            while "i3" in launcher.slots or len(launcher.slots) < 8:
                await setting.hear(seconds=1, per_second=1, instances=0)
                await asyncio.sleep(0.02)
    assert set(launcher.slots) == {f"i{n}" for n in range(8)} - {"i3"} | {"new-1"}


async def test_stops_at_once_in_the_middle_of_a_plan(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_EVERY_S", 0.02)
    launcher = MemoryLauncher([4, 4], {1: 8})
    drains = Drains(never=True)
    patient = executor(launcher, drains, patience=Patience(drain_s=600.0))
    keeper = Keeper(patient, [4, 4], tmp_path / "instances", {4: 2})
    async with serving(MemoryBus(), tmp_path, telemetry, keeper=keeper):
        async with asyncio.timeout(5):
            while not drains.draining:
                await asyncio.sleep(0.01)
    assert launcher.counts() == {1: 8, 2: 0, 4: 0}


async def test_process_proposes_over_nats_and_ends_cleanly(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(PROFILES))
    steps = {"n_output": 256, "thresholds": [0.5, 0.9], "rows": [[32, 64]]}
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    async with start_nats() as server:
        bus = await connect_nats(server.url, name="test")
        proposals: asyncio.Queue[bytes] = asyncio.Queue()
        await bus.subscribe(subjects.PLAN_PROPOSED, lambda m: proposals.put_nowait(m.data))
        process = start(tmp_path, server.url, DILASERVE_NODES="2x4", DILASERVE_PLAN_EVERY_S="0.2")
        try:
            async with asyncio.timeout(30):
                proposal = decode_plan(await proposals.get())
            assert isinstance(proposal, PlanProposed)
            assert proposal.verdict == "hold"
            [card] = await bus.request_many("$SRV.PING.reconfigurator", b"", wait_s=0.3)
            assert json.loads(card.data)["name"] == "reconfigurator"
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=20)
            await bus.close()
    assert process.returncode == 0, errors
    assert (tmp_path / "plans" / f"{proposal.plan_id}.json").exists()


def test_process_names_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(PROFILES))
    process = start(tmp_path, "nats://127.0.0.1:1", DILASERVE_NODES="2x4")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.startswith("dilaserve-reconfigurator: step counts ")


def start(folder: Path, nats_url: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dilaserve_reconfigurator"],
        env={
            "PATH": os.environ["PATH"],
            "DILASERVE_NATS_URL": nats_url,
            "DILASERVE_PROFILE": str(folder / "profile.json"),
            "DILASERVE_RECORDED_STEPS": str(folder / "steps.json"),
            "DILASERVE_PLANS_DIR": str(folder / "plans"),
            **environ,
        },
        stderr=subprocess.PIPE,
        text=True,
    )
