"""What every store promises, run over the memory store and over a real Valkey server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from dilaserve.store import Store
from dilaserve.store.records import (
    LOST_CONFIDENCE,
    MASKED,
    AdmitAnswer,
    CancelAnswer,
    DecodingSpec,
    FailAnswer,
    NewRequest,
    ReassignAnswer,
    RequestRecord,
    ServiceLevel,
)
from dilaserve.testing import (
    N_OUTPUT,
    STATS,
    admitted,
    canvas_of,
    delta_of,
    new_request,
    record_of,
    step_of,
)


class TestNew:
    async def test_stores_everything(self, store: Store) -> None:
        request = new_request()
        assert await store.new(request)
        assert await record_of(store, request.request_id) == RequestRecord(
            request=request,
            state="new",
            epoch=0,
            term=0,
            owner="",
            attempts=0,
            step=0,
            canvas=[MASKED] * N_OUTPUT,
        )

    async def test_keeps_the_first_of_two(self, store: Store) -> None:
        request = new_request()
        assert await store.new(request)
        assert not await store.new(msgspec.structs.replace(request, tenant="other"))
        assert (await record_of(store, request.request_id)).request == request

    async def test_is_not_active(self, store: Store) -> None:
        await store.new(new_request())
        assert await store.active() == []

    async def test_expires_unless_admitted(self, store: Store) -> None:
        gone, kept = new_request(), new_request()
        await store.new(gone, expire_s=0.05)
        await store.new(kept, expire_s=0.05)
        await store.admit(kept.request_id, term=1, owner="w1")
        await asyncio.sleep(0.1)
        records = await store.load([gone.request_id, kept.request_id])
        assert [record and record.state for record in records] == [None, "active"]
        assert await store.new(gone)

    async def test_empty_prompt_and_plain_defaults(self, store: Store) -> None:
        request = NewRequest(
            request_id="plain",
            model_id="m",
            prompt=[],
            spec=DecodingSpec(n_output=1, block_length=32, seed=0),
            level=ServiceLevel(),
            gateway_id="g",
            arrival_s=0.0,
        )
        await store.new(request)
        assert (await record_of(store, "plain")).request == request


class TestAdmit:
    async def test_gives_epoch_one_and_the_owner(self, store: Store) -> None:
        request = new_request()
        await store.new(request)
        answer = await store.admit(request.request_id, term=3, owner="w1")
        assert answer == AdmitAnswer(outcome="admitted", epoch=1, step=0, owner="w1")
        record = await record_of(store, request.request_id)
        assert (record.state, record.epoch, record.term) == ("active", 1, 3)
        assert (record.owner, record.attempts) == ("w1", 0)
        assert await store.active() == [request.request_id]

    async def test_repeated_answers_what_is_stored(self, store: Store) -> None:
        id_ = await admitted(store, owner="w1")
        await store.commit([step_of(id_, 1, {0: 7})])
        answer = await store.admit(id_, term=1, owner="w2")
        assert answer == AdmitAnswer(outcome="already", epoch=1, step=1, owner="w1")
        assert (await record_of(store, id_)).owner == "w1"

    async def test_parks_without_an_owner(self, store: Store) -> None:
        id_ = await admitted(store, owner="")
        assert (await record_of(store, id_)).owner == ""
        assert await store.active() == [id_]

    async def test_after_a_lost_admission_starts_above_the_lost_epoch(self, store: Store) -> None:
        request = new_request()
        await store.new(request)
        answer = await store.admit(request.request_id, term=1, owner="w2", min_epoch=5)
        assert (answer.outcome, answer.epoch) == ("admitted", 5)
        assert await store.commit([step_of(request.request_id, 1, {0: 7}, epoch=1)]) == ["fenced"]
        assert (await record_of(store, request.request_id)).epoch == 5

    async def test_of_what_is_not_there(self, store: Store) -> None:
        assert await store.admit("none", term=1, owner="w1") == AdmitAnswer(outcome="missing")

    async def test_of_what_has_ended(self, store: Store) -> None:
        request = new_request()
        await store.new(request)
        await store.cancel(request.request_id, reason="left")
        answer = await store.admit(request.request_id, term=1, owner="w1")
        assert answer.outcome == "terminal"
        assert (await record_of(store, request.request_id)).state == "cancelled"

    async def test_active_lists_all_and_only_those(self, store: Store) -> None:
        ids = [await admitted(store) for _ in range(40)]
        await store.cancel(ids[0], reason="left")
        await store.fail(ids[1], term=1, error="poison")
        await store.commit([step_of(ids[2], 1, {0: 7}, finish_reason="stop")])
        assert await store.active() == sorted(ids[3:])


class TestCommit:
    async def test_writes_canvas_step_statistics_and_stream(self, store: Store) -> None:
        id_ = await admitted(store)
        first = step_of(id_, 1, {0: 7, 3: 0})
        changes = {"threshold": 0.85, "block": 1, "latency_ms": 3.125, "rebuilt": True}
        second = step_of(id_, 2, {1: 126336, 7: 9}, **changes)
        assert await store.commit([first]) == ["committed"]
        assert await store.commit([second]) == ["committed"]
        record = await record_of(store, id_)
        assert record.canvas == canvas_of(p0=7, p1=126336, p3=0, p7=9)
        assert (record.step, record.state, record.stats) == (2, "active", STATS)
        assert record.ended_s is None
        assert await store.deltas(id_) == [delta_of(first), delta_of(second)]

    async def test_step_that_ends_the_request(self, store: Store) -> None:
        id_ = await admitted(store)
        last = step_of(id_, 1, {0: 2}, finish_reason="stop")
        assert await store.commit([last]) == ["committed"]
        record = await record_of(store, id_)
        assert (record.state, record.finish_reason, record.step) == ("done", "stop", 1)
        assert record.ended_s == pytest.approx(time.time(), abs=60)
        assert await store.active() == []
        assert await store.deltas(id_) == [delta_of(last)]

    async def test_repeated_is_duplicate_and_changes_nothing(self, store: Store) -> None:
        id_ = await admitted(store)
        commits = [step_of(id_, 1, {0: 7}), step_of(id_, 2, {1: 8})]
        await store.commit(commits)
        before = await record_of(store, id_), await store.deltas(id_)
        assert await store.commit(commits) == ["duplicate", "duplicate"]
        assert (await record_of(store, id_), await store.deltas(id_)) == before

    async def test_last_step_repeated_is_duplicate_and_a_further_one_terminal(
        self, store: Store
    ) -> None:
        id_ = await admitted(store)
        last = step_of(id_, 1, {0: 2}, finish_reason="length")
        await store.commit([last])
        assert await store.commit([last]) == ["duplicate"]
        assert await store.commit([step_of(id_, 2, {1: 8})]) == ["terminal"]
        assert await store.commit([step_of(id_, 1, {0: 2}, epoch=2)]) == ["fenced"]

    @pytest.mark.parametrize("epoch", [1, 3])
    async def test_other_epoch_is_fenced(self, store: Store, epoch: int) -> None:
        id_ = await admitted(store)
        await store.reassign(id_, term=1, owner="w2", expected_epoch=1)
        assert await store.commit([step_of(id_, 1, {0: 7}, epoch=epoch)]) == ["fenced"]
        assert (await record_of(store, id_)).canvas == canvas_of()
        assert await store.commit([step_of(id_, 1, {0: 7}, epoch=2)]) == ["committed"]

    async def test_other_weights_than_before_are_fenced(self, store: Store) -> None:
        id_ = await admitted(store)
        first = step_of(id_, 1, {0: 7}, weights_hash="aa")
        assert (await record_of(store, id_)).weights_hash == ""
        assert await store.commit([first]) == ["committed"]
        for weights_hash in ("bb", ""):
            other = step_of(id_, 2, {1: 8}, weights_hash=weights_hash)
            whole = msgspec.structs.replace(other, canvas=canvas_of(p0=7, p1=8))
            assert await store.commit([other, whole, first]) == ["fenced", "fenced", "duplicate"]
        record = await record_of(store, id_)
        assert (record.step, record.weights_hash) == (1, "aa")
        same = step_of(id_, 2, {1: 8}, weights_hash="aa")
        assert await store.commit([same]) == ["committed"]

    async def test_not_admitted_is_fenced(self, store: Store) -> None:
        request = new_request()
        await store.new(request)
        assert await store.commit([step_of(request.request_id, 1, {0: 7})]) == ["fenced"]
        assert (await record_of(store, request.request_id)).state == "new"

    async def test_missing_cancelled_and_failed_are_terminal(self, store: Store) -> None:
        cancelled, failed = await admitted(store), await admitted(store)
        await store.cancel(cancelled, reason="left")
        await store.fail(failed, term=1, error="poison")
        commits = [step_of(id_, 1, {0: 7}) for id_ in ("none", cancelled, failed)]
        assert await store.commit(commits) == ["terminal"] * 3
        assert (await record_of(store, cancelled)).canvas == canvas_of()

    async def test_cancelled_wins_over_duplicate_and_fence(self, store: Store) -> None:
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        await store.cancel(id_, reason="left")
        commits = [step_of(id_, 1, {0: 7}), step_of(id_, 2, {1: 8}, epoch=9)]
        assert await store.commit(commits) == ["terminal", "terminal"]

    async def test_gap_is_filled_by_the_whole_canvas(self, store: Store) -> None:
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        far = step_of(id_, 4, {5: 15})
        assert await store.commit([far]) == ["gap"]
        assert (await record_of(store, id_)).step == 1
        whole = msgspec.structs.replace(far, canvas=canvas_of(p0=7, p1=11, p2=12, p5=15))
        assert await store.commit([whole]) == ["committed"]
        record = await record_of(store, id_)
        assert (record.step, record.canvas) == (4, whole.canvas)
        entry = (await store.deltas(id_))[-1]
        assert (entry.step, entry.positions, entry.tokens) == (4, [1, 2, 5], [11, 12, 15])
        assert entry.confidences == [LOST_CONFIDENCE, LOST_CONFIDENCE, *far.confidences]
        assert await store.commit([whole]) == ["duplicate"]
        assert await store.commit([step_of(id_, 5, {3: 13})]) == ["committed"]

    async def test_gap_filled_by_the_last_step_ends_the_request(self, store: Store) -> None:
        id_ = await admitted(store)
        canvas = canvas_of(p0=7, p1=2)
        last = step_of(id_, 3, {1: 2}, canvas=canvas, finish_reason="stop")
        assert await store.commit([last]) == ["committed"]
        record = await record_of(store, id_)
        assert (record.state, record.step, record.canvas) == ("done", 3, canvas)
        assert (await store.deltas(id_))[0].finish_reason == "stop"

    async def test_canvas_without_a_gap_is_taken_too(self, store: Store) -> None:
        id_ = await admitted(store)
        commit = step_of(id_, 1, {2: 12}, canvas=canvas_of(p2=12))
        assert await store.commit([commit]) == ["committed"]
        assert await store.deltas(id_) == [delta_of(commit)]

    @pytest.mark.parametrize(
        "canvas", [canvas_of(p0=8, p5=15), canvas_of(p5=15)], ids=["changed", "masked"]
    )
    async def test_canvas_that_contradicts_committed_tokens_is_fenced(
        self, store: Store, canvas: list[int]
    ) -> None:
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        before = await record_of(store, id_), await store.deltas(id_)
        assert await store.commit([step_of(id_, 4, {5: 15}, canvas=canvas)]) == ["fenced"]
        assert (await record_of(store, id_), await store.deltas(id_)) == before

    @pytest.mark.parametrize("token", [7, 8])
    async def test_position_that_is_committed_already_is_fenced(
        self, store: Store, token: int
    ) -> None:
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {3: 7})])
        before = await record_of(store, id_), await store.deltas(id_)
        assert await store.commit([step_of(id_, 2, {2: 6, 3: token})]) == ["fenced"]
        assert (await record_of(store, id_), await store.deltas(id_)) == before

    async def test_batch_is_answered_item_by_item(self, store: Store) -> None:
        ids = [await admitted(store) for _ in range(20)]
        await store.cancel(ids[3], reason="left")
        await store.reassign(ids[5], term=1, owner="w2", expected_epoch=1)
        await store.commit([step_of(ids[7], 1, {0: 1})])
        answers = await store.commit([step_of(id_, 1, {0: 1}) for id_ in ids])
        expected = ["committed"] * 20
        expected[3], expected[5], expected[7] = "terminal", "fenced", "duplicate"
        assert answers == expected
        assert await store.commit([]) == []

    async def test_one_request_twice_in_a_batch_is_taken_in_order(self, store: Store) -> None:
        id_ = await admitted(store)
        commits = [step_of(id_, 1, {0: 1}), step_of(id_, 2, {1: 2}), step_of(id_, 2, {1: 3})]
        assert await store.commit(commits) == ["committed", "committed", "duplicate"]
        assert (await record_of(store, id_)).canvas == canvas_of(p0=1, p1=2)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"tokens": [1]}, "lengths"),
            ({"confidences": [0.5]}, "lengths"),
            ({"positions": [1, 0]}, "not ascending"),
            ({"positions": [1, 1]}, "not ascending"),
            ({"positions": [-1, 1]}, "not ascending"),
            ({"tokens": [1, MASKED]}, "not all token ids"),
            ({"tokens": [1, 2**31]}, "not all token ids"),
            ({"epoch": 0}, "start at 1"),
            ({"step": 0}, "start at 1"),
            ({"canvas": canvas_of(p0=1)}, "lacks the tokens"),
            ({"canvas": [1]}, "lacks the tokens"),
            ({"canvas": [1, 2, -2, -1, -1, -1, -1, -1]}, "no token id"),
        ],
    )
    async def test_malformed_is_refused_before_anything_is_written(
        self, store: Store, changes: dict[str, Any], why: str
    ) -> None:
        good, bad = await admitted(store), await admitted(store)
        malformed = msgspec.structs.replace(step_of(bad, 1, {0: 1, 1: 2}), **changes)
        with pytest.raises(ValueError, match=f"{why}.*bug"):
            await store.commit([step_of(good, 1, {0: 1}), malformed])
        assert (await record_of(store, good)).step == 0

    @pytest.mark.parametrize(
        "bad",
        [{"tokens": {N_OUTPUT: 1}}, {"tokens": {0: 1}, "canvas": [1, 2]}],
        ids=["position", "canvas"],
    )
    async def test_outside_of_the_canvas_is_refused_alone(
        self, store: Store, bad: dict[str, Any]
    ) -> None:
        good, other = await admitted(store), await admitted(store)
        with pytest.raises(ValueError, match=f"commit of {other} .*outside"):
            await store.commit([step_of(other, 1, **bad), step_of(good, 1, {0: 1})])
        assert (await record_of(store, good)).step == 1
        assert (await record_of(store, other)).step == 0


class TestReassign:
    async def test_raises_the_epoch_and_returns_what_is_stored(self, store: Store) -> None:
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        answer = await store.reassign(id_, term=2, owner="w2", expected_epoch=1)
        assert answer == ReassignAnswer(
            outcome="reassigned", epoch=2, step=1, owner="w2", attempts=0
        )
        record = await record_of(store, id_)
        assert (record.epoch, record.owner, record.term) == (2, "w2", 2)
        assert record.canvas == canvas_of(p0=7)

    async def test_counts_deaths_only(self, store: Store) -> None:
        id_ = await admitted(store)
        for epoch, died in ((1, True), (2, False), (3, True)):
            await store.reassign(id_, term=1, owner="", expected_epoch=epoch, owner_died=died)
        record = await record_of(store, id_)
        assert (record.attempts, record.epoch, record.owner) == (2, 4, "")

    async def test_repeated_after_a_lost_answer_sees_its_own_work(self, store: Store) -> None:
        id_ = await admitted(store)
        await store.reassign(id_, term=1, owner="w2", expected_epoch=1, owner_died=True)
        answer = await store.reassign(id_, term=1, owner="w2", expected_epoch=1, owner_died=True)
        assert answer == ReassignAnswer(outcome="conflict", epoch=2, step=0, owner="w2", attempts=1)

    @pytest.mark.parametrize(("min_epoch", "epoch"), [(0, 2), (2, 2), (3, 3), (9, 9)])
    async def test_goes_at_least_to_the_epoch_asked_for(
        self, store: Store, min_epoch: int, epoch: int
    ) -> None:
        id_ = await admitted(store)
        answer = await store.reassign(
            id_, term=1, owner="w2", expected_epoch=1, min_epoch=min_epoch
        )
        assert (answer.outcome, answer.epoch) == ("reassigned", epoch)

    async def test_of_what_is_missing_new_or_ended(self, store: Store) -> None:
        fresh, ended = new_request(), await admitted(store)
        await store.new(fresh)
        await store.commit([step_of(ended, 1, {0: 2}, finish_reason="stop")])
        answers = [
            (await store.reassign(id_, term=1, owner="w2", expected_epoch=epoch)).outcome
            for id_, epoch in (("none", 1), (fresh.request_id, 0), (ended, 1))
        ]
        assert answers == ["missing", "conflict", "terminal"]

    async def test_only_one_of_many_at_once_wins(self, store: Store) -> None:
        id_ = await admitted(store)
        answers = await asyncio.gather(
            *(store.reassign(id_, term=1, owner=f"w{i}", expected_epoch=1) for i in range(20))
        )
        outcomes = sorted(answer.outcome for answer in answers)
        assert outcomes == ["conflict"] * 19 + ["reassigned"]
        [winner] = [answer for answer in answers if answer.outcome == "reassigned"]
        assert (await record_of(store, id_)).owner == winner.owner


class TestEnds:
    async def test_cancel_works_at_any_time_but_once(self, store: Store) -> None:
        fresh, running, done = new_request(), await admitted(store), await admitted(store)
        await store.new(fresh)
        await store.commit([step_of(done, 1, {0: 2}, finish_reason="stop")])
        for id_, outcome in (
            (fresh.request_id, "cancelled"),
            (running, "cancelled"),
            (running, "terminal"),
            (done, "terminal"),
            ("none", "missing"),
        ):
            assert await store.cancel(id_, reason="client left") == CancelAnswer(outcome=outcome)
        record = await record_of(store, running)
        assert (record.state, record.error) == ("cancelled", "client left")
        assert (await record_of(store, done)).state == "done"
        assert await store.active() == []

    async def test_fail_works_at_any_time_but_once(self, store: Store) -> None:
        fresh, running = new_request(), await admitted(store)
        await store.new(fresh)
        for id_, outcome in (
            (fresh.request_id, "failed"),
            (running, "failed"),
            (running, "terminal"),
            ("none", "missing"),
        ):
            assert await store.fail(id_, term=1, error="died 3 times") == FailAnswer(
                outcome=outcome
            )
        record = await record_of(store, running)
        assert (record.state, record.error) == ("failed", "died 3 times")
        assert await store.active() == []


class TestDeltas:
    async def test_start_after_a_step(self, store: Store) -> None:
        id_ = await admitted(store)
        for step in range(1, N_OUTPUT + 1):
            await store.commit([step_of(id_, step, {step - 1: step})])
        assert [d.step for d in await store.deltas(id_)] == list(range(1, N_OUTPUT + 1))
        assert [d.step for d in await store.deltas(id_, after_step=5)] == [6, 7, 8]
        assert await store.deltas(id_, after_step=8) == []
        assert await store.deltas("none") == []

    async def test_load_keeps_the_order_asked_for(self, store: Store) -> None:
        ids = [await admitted(store) for _ in range(3)]
        asked = [ids[2], "none", ids[0], ids[2]]
        records = await store.load(asked)
        assert [record.request.request_id if record else None for record in records] == [
            ids[2],
            None,
            ids[0],
            ids[2],
        ]
        assert await store.load([]) == []

    async def test_run_id_stays_while_the_server_runs(self, store: Store) -> None:
        assert await store.run_id() == await store.run_id() != ""

    async def test_memory_grows_with_what_is_stored(self, store: Store) -> None:
        before = await store.memory()
        await store.new(new_request(prompt=list(range(100_000))))
        after = await store.memory()
        assert after.used >= before.used + 400_000
        assert after.limit >= 0
