"""Commands: fenced by (term, seq), repeated, lost, stale; credits, releases, moves, refusals."""

from __future__ import annotations

import msgspec

from dilaserve import subjects
from dilaserve.messages import ConfidenceStats, Release, StepItem
from dilaserve.store.records import Commit

STATS = ConfidenceStats(min=0.1, q25=0.2, median=0.3, mean=0.4, q75=0.5)


def item(request_id: str, **of) -> StepItem:
    return StepItem(
        request_id=request_id, **{"epoch": 1, "threshold": 0.9, "until_block": 99, **of}
    )


async def test_a_worker_that_hears_nothing_stops_at_the_end_of_its_credit(rig):
    await rig.new("r", n_output=12)
    await rig.credit("r", until_block=1)
    await rig.until(lambda: rig.steps("r") == list(range(1, 9)))
    await rig.quiet()
    assert rig.engine.n_passes == 8
    assert rig.held() == {"r": (1, 8)}
    await rig.credit("r", until_block=2)
    await rig.until(lambda: rig.steps("r") == list(range(1, 13)))


async def test_the_limit_of_recomputes_is_that_of_the_last_command(rig):
    await rig.new("r")
    await rig.command(item("r", until_step=1), recompute_tokens=40)
    await rig.until(lambda: rig.steps("r") == [1])
    assert rig.engine.recompute_tokens == 40
    await rig.command(item("r", until_step=2))
    await rig.until(lambda: rig.steps("r") == [1, 2])
    assert rig.engine.recompute_tokens is None


async def test_stale_commands_are_ignored(rig):
    await rig.new("r")
    await rig.command(item("r", until_step=1), term=2, seq=5)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.command(item("r"), term=2, seq=5)
    await rig.command(item("r"), term=2, seq=4)
    await rig.command(item("r"), term=1, seq=99)
    await rig.quiet()
    assert rig.steps("r") == [1]
    assert (rig.heartbeats[-1].term, rig.heartbeats[-1].seq) == (2, 5)
    assert rig.metric("dilaserve:messages_dropped_total", reason="stale") == 3
    await rig.command(item("r", until_step=2), term=3, seq=1)
    await rig.until(lambda: rig.steps("r") == [1, 2])
    assert rig.store.n_loads == 1


async def test_a_repeated_item_does_no_harm(rig):
    await rig.new("r")
    for _ in range(3):
        await rig.credit("r", until_step=2)
    await rig.until(lambda: rig.steps("r") == [1, 2])
    for _ in range(3):
        await rig.credit("r", until_step=2)
    await rig.quiet()
    assert rig.engine.n_passes == 2
    assert len(rig.engine.added) == 1


async def test_the_threshold_changes_from_step_to_step(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1, threshold=0.9)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.credit("r", threshold=0.5)
    await rig.until(lambda: len(rig.items) == 4)
    assert [i.threshold for i in rig.items] == [0.9, 0.5, 0.5, 0.5]


async def test_credit_may_be_taken_back(rig):
    await rig.new("r", n_output=8)
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_begun)
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.heartbeats[-1].seq == 2)
    rig.engine.passing.set()
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.quiet()
    assert rig.engine.n_passes == 1


async def test_a_release_forgets_and_absence_does_not(rig):
    for name in ("a", "b"):
        await rig.new(name)
        await rig.credit(name, until_step=1)
    await rig.until(lambda: rig.steps("a") == rig.steps("b") == [1])
    await rig.command(releases=[Release(request_id="a", epoch=1)])
    await rig.until(lambda: list(rig.engine.held) == ["b"])
    await rig.quiet()
    assert rig.held() == {"b": (1, 1)}


async def test_a_release_of_an_older_epoch_is_ignored(rig):
    await rig.new("r")
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2, until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.command(releases=[Release(request_id="r", epoch=1)])
    await rig.quiet()
    assert rig.held() == {"r": (2, 1)}


async def test_a_release_before_the_load_means_no_load(rig):
    await rig.new("r")
    await rig.command(item("r"), releases=[Release(request_id="r", epoch=1)])
    await rig.quiet()
    assert rig.store.n_loads == 0
    assert rig.rejected == []


async def test_what_is_computed_while_the_release_arrives_is_not_lost(rig):
    await rig.new("r")
    rig.engine.passing.clear()
    await rig.credit("r")
    await rig.until(lambda: rig.engine.n_begun)
    await rig.command(releases=[Release(request_id="r", epoch=1)])
    await rig.until(lambda: rig.heartbeats[-1].seq == 2)
    rig.engine.passing.set()
    await rig.until(lambda: not rig.engine.held)
    await rig.until(lambda: rig.items)
    assert rig.steps("r") == [1]
    assert (await rig.record("r")).step == 1


async def test_an_item_of_an_older_epoch_is_ignored(rig):
    await rig.new("r")
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2, until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.credit("r", epoch=1, threshold=0.1)
    await rig.quiet()
    assert rig.held() == {"r": (2, 1)}
    assert rig.rejected == []
    assert rig.engine.held["r"].credit.threshold == 0.9


async def test_a_new_epoch_keeps_the_canvas_that_is_held(rig):
    await rig.new("r")
    await rig.credit("r", until_step=2)
    await rig.until(lambda: rig.steps("r") == [1, 2])
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2)
    await rig.until(lambda: rig.steps("r") == [1, 2, 3, 4])
    assert len(rig.engine.added) == 1
    assert [delta.epoch for delta in rig.deltas] == [1, 1, 2, 2]


async def test_a_new_epoch_whose_store_has_lost_steps_keeps_what_clients_have_seen(rig):
    await rig.new("r", n_output=8)
    await rig.credit("r", until_step=1, threshold=0.9)
    await rig.until(lambda: rig.steps("r") == [1])
    old = rig.store.snapshot()
    await rig.credit("r", until_step=3, threshold=0.9)
    await rig.until(lambda: rig.steps("r") == [1, 2, 3])
    rig.store.restore(old)
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2, threshold=0.5)
    await rig.until(lambda: len(rig.steps("r")) == 8)
    assert (await rig.record("r")).canvas == [90_000, 90_001, 90_002, *range(50_003, 50_008)]


async def test_a_fenced_request_that_comes_back_keeps_what_clients_have_seen(rig):
    """As above, but the fenced commit comes before the command with the new epoch."""
    await rig.new("r", n_output=8)
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    old = rig.store.snapshot()
    await rig.credit("r", until_step=3)
    await rig.until(lambda: rig.steps("r") == [1, 2, 3])
    rig.store.restore(old)
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", until_step=4)
    await rig.until(lambda: rig.items[-1].outcome == "fenced")
    assert rig.steps("r") == [1, 2, 3]
    await rig.credit("r", epoch=2, threshold=0.5)
    await rig.until(lambda: len(rig.steps("r")) == 8)
    assert (await rig.record("r")).canvas == [90_000, 90_001, 90_002, *range(50_003, 50_008)]
    assert rig.engine.added[1].confidences == [0.9] * 3 + [0.0] * 5


async def test_a_new_epoch_reloads_what_another_worker_did(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.store.reassign("r", term=1, owner="worker-ffff", expected_epoch=1)
    commit = rig.store.asked[-1]
    await rig.store.commit([other_step(commit, epoch=2, step=2, position=1)])
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=2)
    await rig.credit("r", epoch=3)
    await rig.until(lambda: rig.steps("r") == [1, 3, 4])
    assert (await rig.record("r")).canvas == [90_000, 777, 90_002, 90_003]
    assert [request.step for request in rig.engine.added] == [0, 2]
    assert rig.engine.added[1].confidences == [0.9, 0.8, 0.0, 0.0]


async def test_a_damaged_stream_costs_its_confidences_and_nothing_else(rig):
    """As a new owner finds it: a position outside the canvas, and one confidence too few."""
    await rig.new("r", owner="worker-ffff")
    first = Commit(
        request_id="r",
        epoch=1,
        step=1,
        block=0,
        kind="recompute",
        threshold=0.9,
        worker="worker-ffff",
        latency_ms=1.0,
        positions=[0, 1],
        tokens=[7, 8],
        confidences=[0.8, 0.7],
        stats=STATS,
    )
    await rig.store.commit([first])
    stream = await rig.store.deltas("r")
    damaged = msgspec.structs.replace(stream[0], positions=[0, 99, 1], confidences=[0.6, 0.5])

    async def deltas(request_id, *, after_step=0):
        return [damaged]

    rig.store.deltas = deltas
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2)
    await rig.until(lambda: rig.engine.added)
    assert rig.engine.added[0].confidences == [0.6, 0.0, 0.0, 0.0]


async def test_a_new_epoch_is_read_only_after_the_commit_in_flight(rig):
    await rig.new("r")
    rig.store.answering.clear()
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.store.asked)
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2)
    await rig.quiet()
    assert rig.store.n_loads == 1
    rig.store.answering.set()
    await rig.until(lambda: rig.steps("r") == [1, 2, 3, 4])
    assert [i.outcome for i in rig.items] == ["fenced"] + ["committed"] * 4
    assert {delta.epoch for delta in rig.deltas} == {2}


async def test_what_cannot_run_is_rejected_with_the_reason(rig):
    await rig.new("cancelled")
    await rig.store.cancel("cancelled", reason="the client left")
    await rig.new("moved-on")
    await rig.store.reassign("moved-on", term=1, owner="worker-ffff", expected_epoch=1)
    await rig.new("anothers", owner="worker-ffff")
    await rig.new("long", n_output=2000)
    await rig.new("foreign", model_id="huge")
    await rig.new("good")
    names = ["nowhere", "cancelled", "moved-on", "anothers", "long", "foreign", "good"]
    await rig.command(*[item(name) for name in names])
    await rig.until(lambda: len(rig.rejected) == 6)
    assert {r.request_id: r.reason for r in rig.rejected} == {
        "nowhere": "unknown",
        "cancelled": "terminal",
        "moved-on": "fenced",
        "anothers": "fenced",
        "long": "never_fits",
        "foreign": "invalid",
    }
    assert all(r.detail and r.epoch == 1 for r in rig.rejected)
    await rig.until(lambda: rig.steps("good") == [1, 2, 3, 4])
    assert rig.store.n_loads == 1


async def test_an_epoch_that_the_store_has_lost_is_unknown_and_changes_nothing(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.credit("r", epoch=2)
    await rig.until(lambda: rig.rejected)
    assert (rig.rejected[0].reason, rig.rejected[0].epoch) == ("unknown", 2)
    await rig.quiet()
    assert rig.held() == {"r": (1, 1)}


async def test_a_held_request_that_ended_elsewhere_is_forgotten(rig):
    await rig.new("r")
    await rig.credit("r", until_step=1)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.store.fail("r", term=1, error="poison")
    await rig.credit("r", epoch=2)
    await rig.until(lambda: rig.rejected)
    assert rig.rejected[0].reason == "terminal"
    await rig.until(lambda: not rig.engine.held)


async def test_malformed_messages_are_counted_and_dropped(rig):
    subject = subjects.command_step(rig.instance_id)
    await rig.bus.publish(subject, b"not json")
    await rig.bus.publish(subject, b'{"type":"from_the_future"}')
    await rig.bus.publish(subject, b'{"type":"step_command","term":"one","seq":1}')
    await rig.new("r")
    await rig.credit("r")
    await rig.until(lambda: rig.steps("r") == [1, 2, 3, 4])
    assert rig.metric("dilaserve:messages_dropped_total", reason="invalid") == 3


def other_step(commit, *, epoch: int, step: int, position: int):
    """A commit of another worker."""
    return msgspec.structs.replace(
        commit,
        epoch=epoch,
        step=step,
        kind="cache",
        worker="worker-ffff",
        positions=[position],
        tokens=[777],
        confidences=[0.8],
    )
