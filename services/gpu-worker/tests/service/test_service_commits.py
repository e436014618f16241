"""Every answer of `commit`, and the order of computing, committing and emitting."""

from __future__ import annotations

import pytest


async def test_a_request_runs_to_its_end(rig):
    await rig.new("r", n_output=6)
    await rig.credit("r")
    await rig.until(lambda: len(rig.items) == 6)
    record = await rig.record("r")
    assert record.state == "done"
    assert record.finish_reason == "length"
    assert record.canvas == [90_000 + i for i in range(6)]
    assert [token for delta in rig.deltas for token in delta.tokens] == record.canvas
    assert rig.steps("r") == [1, 2, 3, 4, 5, 6]
    assert [item.kind for item in rig.items] == ["recompute", *["cache"] * 3, "recompute", "cache"]
    assert [item.outcome for item in rig.items] == ["committed"] * 6
    assert rig.items[-1].finish_reason == rig.deltas[-1].finish_reason == "length"
    assert [result.batch for result in rig.results] == [1, 2, 3, 4, 5, 6]
    await rig.until(lambda: not rig.engine.held, "the ended request leaves the engine")
    await rig.quiet()
    assert rig.held() == {}


async def test_nothing_is_emitted_before_the_store_has_answered(rig):
    rig.store.answering.clear()
    await rig.new("r")
    await rig.credit("r")
    await rig.until(lambda: rig.store.asked)
    await rig.quiet()
    assert rig.deltas == []
    assert rig.results == []
    rig.store.answering.set()
    await rig.until(lambda: len(rig.items) == 4)


async def test_one_pass_and_no_more_runs_ahead_of_an_unanswered_commit(rig):
    rig.store.answering.clear()
    await rig.new("r", n_output=8)
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_passes == 2, "the pass ahead")
    await rig.quiet()
    assert rig.engine.n_passes == 2
    assert [commit.step for commit in rig.store.asked] == [1]
    rig.store.answering.set()
    await rig.until(lambda: len(rig.items) == 8)
    assert [commit.step for commit in rig.store.asked] == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_requests_join_and_share_round_trips(rig):
    rig.engine.passing.clear()
    for name in ("a", "b", "c"):
        await rig.new(name)
        await rig.credit(name)
    rig.engine.passing.set()
    await rig.until(lambda: len(rig.items) == 12)
    assert {(await rig.record(name)).state for name in ("a", "b", "c")} == {"done"}
    assert any(len(result.items) > 1 for result in rig.results)


async def test_a_lost_answer_is_asked_for_again_and_emitted_once(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: len(rig.items) == 1)
    rig.store.lose_answers = 1
    await rig.credit("r")
    await rig.until(lambda: len(rig.items) == 4)
    assert [item.outcome for item in rig.items] == ["committed", "duplicate"] + ["committed"] * 2
    assert rig.steps("r") == [1, 2, 3, 4]
    assert rig.metric("dilaserve:commits_total", outcome="duplicate") == 1


async def test_a_fenced_request_is_forgotten_without_a_word_to_the_client(rig):
    await rig.new("r")
    await rig.new("other")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.store.reassign("r", term=1, owner="worker-ffff", expected_epoch=1)
    await rig.credit("r")
    await rig.until(lambda: len(rig.items) == 2)
    assert rig.items[-1].outcome == "fenced"
    assert rig.steps("r") == [1]
    await rig.until(lambda: "r" not in rig.engine.held)
    assert (await rig.record("r")).step == 1
    await rig.credit("other")
    await rig.until(lambda: rig.steps("other") == [1, 2, 3, 4], "the others go on")


async def test_lost_steps_are_written_again_with_the_whole_canvas(rig):
    await rig.new("r", n_output=8)
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    old = rig.store.snapshot()
    await rig.credit("r", until_step=3)
    await rig.until(lambda: rig.steps("r") == [1, 2, 3])
    rig.store.restore(old)
    await rig.credit("r")
    await rig.until(lambda: rig.steps("r") == list(range(1, 9)))
    record = await rig.record("r")
    assert record.canvas == [90_000 + i for i in range(8)]
    assert [d.step for d in await rig.store.deltas("r")] == [1, 4, 5, 6, 7, 8]
    assert [item.outcome for item in rig.items] == ["committed"] * 8
    assert rig.metric("dilaserve:commits_total", outcome="gap") == 1


async def test_a_cancelled_request_frees_its_slot_within_a_step(rig):
    await rig.new("r", n_output=100)
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.engine.added)
    await rig.store.cancel("r", reason="the client left")
    rig.engine.passing.set()
    await rig.until(lambda: not rig.engine.held)
    assert rig.engine.n_passes <= 2
    await rig.until(lambda: rig.items)
    assert [item.outcome for item in rig.items] == ["terminal"]
    assert rig.deltas == []


async def test_an_outage_loses_nothing_and_emits_nothing_meanwhile(rig):
    await rig.new("r", n_output=8)
    await rig.credit("r", until_step=2)
    await rig.until(lambda: rig.steps("r") == [1, 2])
    rig.store.down = True
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_passes == 4, "a pass, and one ahead of its commit")
    await rig.quiet()
    assert rig.engine.n_passes == 4
    assert rig.steps("r") == [1, 2]
    rig.store.down = False
    await rig.until(lambda: len(rig.items) == 8)
    assert rig.steps("r") == list(range(1, 9))
    assert (await rig.record("r")).state == "done"


async def test_a_load_waits_for_the_store(rig):
    await rig.new("r")
    rig.store.down = True
    await rig.credit("r")
    await rig.until(lambda: rig.store.n_loads >= 2, "it asks again")
    assert rig.engine.added == []
    assert rig.rejected == []
    rig.store.down = False
    await rig.until(lambda: rig.steps("r") == [1, 2, 3, 4])


async def test_without_the_bus_the_steps_are_committed_all_the_same(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.heartbeats[-1].seq == 2)
    rig.worker_bus.disconnect()
    rig.engine.passing.set()
    await rig.until(lambda: not rig.engine.held)
    assert (await rig.record("r")).state == "done"
    assert rig.steps("r") == [1]
    assert rig.metric("dilaserve:messages_dropped_total", reason="unsent") >= 6


@pytest.mark.parametrize("n_steps", [1, 2])
async def test_run_ahead_of_a_step_waits_for_credit(rig, n_steps):
    await rig.new("r")
    await rig.credit("r", until_step=n_steps)
    await rig.until(lambda: len(rig.items) == n_steps)
    await rig.quiet()
    assert rig.engine.n_passes == n_steps
