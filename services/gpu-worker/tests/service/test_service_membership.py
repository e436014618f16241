"""Joining, heartbeats and leaving."""

from __future__ import annotations

import asyncio
import signal

import pytest

from dilaserve import subjects
from dilaserve.crashpoints import CrashPoints
from dilaserve.messages import StopCommand, encode
from dilaserve_gpu_worker.engine.types import EngineLostError


async def test_it_joins_after_a_real_step_and_beats(rig):
    assert len(rig.ups) == 1
    assert rig.events[0] is rig.ups[0]
    assert rig.ups[0].info.instance_id == rig.instance_id
    await rig.until(lambda: len(rig.heartbeats) > 2)
    assert rig.heartbeats[-1].info == rig.ups[0].info
    assert rig.heartbeats[-1].n_free_kv_tokens == 1000
    assert (rig.heartbeats[-1].term, rig.heartbeats[-1].seq) == (0, 0)


async def test_the_warm_up_leaves_nothing_behind(make_rig):
    rig = await make_rig()
    assert [request.request_id for request in rig.engine.added] == ["warm-up"]
    assert rig.engine.n_passes == 2
    assert rig.engine.held == {}
    assert rig.results == []


async def test_heartbeats_say_what_is_held_and_what_is_free(rig):
    await rig.new("r", n_output=7)
    await rig.credit("r", until_step=2)
    await rig.until(lambda: rig.steps("r") == [1, 2])
    await rig.quiet()
    beat = rig.heartbeats[-1]
    assert rig.held() == {"r": (1, 2)}
    assert beat.n_free_kv_tokens == 1000 - 3 - 7
    assert (beat.term, beat.seq) == (1, 1)


async def test_heartbeats_do_not_stall_behind_a_pass_or_a_commit(rig):
    rig.engine.passing.clear()
    await rig.new("r")
    await rig.credit("r")
    await rig.until(lambda: rig.engine.added)
    await rig.quiet()
    rig.store.answering.clear()
    rig.engine.passing.set()
    await rig.until(lambda: rig.store.asked)
    await rig.quiet()
    assert rig.held() == {"r": (1, 0)}
    rig.store.answering.set()


async def test_a_command_counts_as_applied_only_with_its_requests_loaded(rig):
    await rig.new("r")
    rig.store.down = True
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.store.n_loads)
    await rig.quiet()
    assert rig.heartbeats[-1].seq == 0
    rig.store.down = False
    await rig.until(lambda: rig.heartbeats[-1].seq == 1)
    assert "r" in rig.held()


async def test_a_stop_command_ends_it_after_the_step_in_flight(make_rig, stopping):
    rig = await make_rig(started=False)
    _, running = stopping(rig, stop_timeout_s=10)
    await rig.until(lambda: rig.heartbeats)
    await rig.new("r", n_output=8)
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_begun == 2 + 1)
    await rig.bus.publish(subjects.command_stop(rig.instance_id), encode(StopCommand(reason="x")))
    await rig.quiet()
    assert not running.done()
    rig.engine.passing.set()
    await asyncio.wait_for(running, 5)
    await rig.until(lambda: rig.downs)
    assert rig.steps("r") == [1]
    assert (await rig.record("r")).step == 1
    assert rig.downs[0].reason == "x"
    assert rig.events[-1] is rig.downs[0]


def go_down(store):
    store.down = True


def hang(store):
    store.answering.clear()
    store.loading.clear()


@pytest.mark.parametrize("trouble", [go_down, hang])
async def test_a_stop_does_not_wait_for_ever_for_the_store(make_rig, stopping, trouble):
    rig = await make_rig(started=False)
    service, running = stopping(rig)
    await rig.until(lambda: rig.heartbeats)
    await rig.new("r", n_output=8)
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    trouble(rig.store)
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_passes == 2 + 3)
    service.stop("SIGTERM")
    await asyncio.wait_for(running, 5)
    await rig.until(lambda: rig.downs)
    assert rig.steps("r") == [1]


@pytest.mark.parametrize("trouble", [go_down, hang])
async def test_a_stop_waits_for_no_load(make_rig, stopping, trouble):
    """Whoever stops has no use for one."""
    rig = await make_rig(started=False)
    service, running = stopping(rig, stop_timeout_s=60)
    await rig.until(lambda: rig.heartbeats)
    await rig.new("r")
    trouble(rig.store)
    await rig.credit("r")
    await rig.until(lambda: rig.store.n_loads)
    service.stop("SIGTERM")
    await asyncio.wait_for(running, 5)
    assert rig.deltas == []


async def test_a_stop_does_not_wait_for_ever_for_a_pass(make_rig, stopping):
    """Of an engine whose process answers, as it does in the middle of one."""
    rig = await make_rig(started=False)
    service, running = stopping(rig)
    await rig.until(lambda: rig.heartbeats)
    await rig.new("r")
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_begun == 2 + 1)
    service.stop("SIGTERM")
    await asyncio.wait_for(running, 5)
    rig.engine.passing.set()
    await rig.until(lambda: rig.downs)
    assert (await rig.record("r")).step == 0


async def test_an_engine_that_fails_takes_its_instance_down(make_rig, stopping):
    rig = await make_rig(started=False)
    _, running = stopping(rig)
    await rig.until(lambda: rig.heartbeats)

    def fail(plan):
        raise RuntimeError("CUDA error: device-side assert triggered")

    rig.engine.forward = fail
    await rig.new("r")
    await rig.credit("r")
    with pytest.raises(EngineLostError, match="device-side assert"):
        await asyncio.wait_for(running, 5)
    await rig.until(lambda: rig.downs)
    assert "device-side assert" in rig.downs[0].reason


async def test_it_answers_to_the_micro_protocol(rig):
    answers = await rig.bus.request_many("$SRV.INFO.gpu-worker", b"", wait_s=0.05)
    assert len(answers) == 1
    assert rig.instance_id.encode() in answers[0].data


DEATHS = {
    "worker.command_in_flight": asyncio.CancelledError,
    "worker.before_forward": EngineLostError,
    "worker.after_forward": EngineLostError,
    "worker.after_commit": ExceptionGroup,
}
"""What death looks like where `os.kill` raises."""


@pytest.mark.parametrize(
    ("point", "n_commits", "n_deltas"),
    [
        ("worker.command_in_flight", 0, 0),
        ("worker.before_forward", 0, 0),
        ("worker.after_forward", 0, 0),
        ("worker.after_commit", 1, 0),
    ],
)
async def test_crash_points_lie_where_they_say(make_rig, monkeypatch, point, n_commits, n_deltas):
    rig = await make_rig(started=False)
    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        loop.call_soon_threadsafe(died.set)
        raise SystemError("stands for death")

    monkeypatch.setattr("os.kill", kill)
    running = asyncio.create_task(rig.build(crash=CrashPoints(f"{point}:1")).run())
    await rig.until(lambda: rig.heartbeats)
    loop.set_exception_handler(lambda loop, context: None)
    await rig.new("r")
    await rig.credit("r")
    await asyncio.wait_for(died.wait(), 5)
    if point == "worker.command_in_flight":
        running.cancel()
    with pytest.raises(DEATHS[point]):
        await running
    assert (await rig.record("r")).step == n_commits
    assert len(rig.deltas) == n_deltas


@pytest.fixture
async def stopping():
    """Run a rig's service in a task that the test itself ends."""
    tasks = []

    def start(rig, **options):
        service = rig.build(**options)
        tasks.append(asyncio.create_task(service.run()))
        return service, tasks[-1]

    yield start
    assert all(task.done() for task in tasks)
