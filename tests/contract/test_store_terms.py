"""The scheduler's lease and terms: a replaced scheduler is refused everywhere; over both stores."""

from __future__ import annotations

import asyncio

import pytest

from dilaserve.store import Store
from dilaserve.store.records import AdmitAnswer, FailAnswer, ReassignAnswer
from dilaserve.testing import admitted, new_request, record_of, step_of

LONG_S = 60.0


class TestLease:
    async def test_one_holder_at_a_time(self, store: Store) -> None:
        assert await store.take_lease("a", ttl_s=LONG_S) == 1
        assert await store.take_lease("b", ttl_s=LONG_S) is None
        await store.release_lease("a", term=1)
        assert await store.take_lease("b", ttl_s=LONG_S) == 2

    async def test_one_of_many_at_once_gets_it(self, store: Store) -> None:
        holders = [f"s{i}" for i in range(10)]
        terms = await asyncio.gather(*(store.take_lease(h, ttl_s=LONG_S) for h in holders))
        assert [term for term in terms if term is not None] == [1]

    async def test_runs_out(self, store: Store) -> None:
        assert await store.take_lease("a", ttl_s=0.05) == 1
        await asyncio.sleep(0.1)
        assert not await store.renew_lease("a", term=1, ttl_s=LONG_S)
        assert await store.take_lease("b", ttl_s=LONG_S) == 2

    async def test_renewed_it_lives_on(self, store: Store) -> None:
        await store.take_lease("a", ttl_s=0.15)
        for _ in range(4):
            await asyncio.sleep(0.05)
            assert await store.renew_lease("a", term=1, ttl_s=0.15)
        assert await store.take_lease("b", ttl_s=LONG_S) is None

    async def test_only_its_own_holder_and_term_count(self, store: Store) -> None:
        await store.take_lease("a", ttl_s=LONG_S)
        assert not await store.renew_lease("b", term=1, ttl_s=LONG_S)
        assert not await store.renew_lease("a", term=2, ttl_s=LONG_S)
        await store.release_lease("b", term=1)
        await store.release_lease("a", term=0)
        assert await store.renew_lease("a", term=1, ttl_s=LONG_S)

    async def test_taken_again_by_its_holder_after_a_lost_answer(self, store: Store) -> None:
        assert await store.take_lease("a", ttl_s=LONG_S) == 1
        assert await store.take_lease("a", ttl_s=LONG_S) == 2
        assert not await store.renew_lease("a", term=1, ttl_s=LONG_S)
        assert await store.renew_lease("a", term=2, ttl_s=LONG_S)

    async def test_holders_may_have_spaces_and_digits(self, store: Store) -> None:
        assert await store.take_lease("scheduler 1 of 2", ttl_s=LONG_S) == 1
        assert await store.take_lease("2", ttl_s=LONG_S) is None
        assert await store.renew_lease("scheduler 1 of 2", term=1, ttl_s=LONG_S)
        assert await store.take_lease("scheduler 1 of 2", ttl_s=LONG_S) == 2

    async def test_goes_above_terms_that_the_store_has_lost(self, store: Store) -> None:
        assert await store.take_lease("a", ttl_s=LONG_S, min_term=41) == 41
        assert await store.take_lease("a", ttl_s=LONG_S, min_term=7) == 42

    async def test_goes_above_terms_that_only_writes_have_told(self, store: Store) -> None:
        await admitted(store, term=9)
        assert await store.take_lease("a", ttl_s=LONG_S) == 10


class TestTerms:
    async def test_a_replaced_scheduler_is_refused_for_every_request(self, store: Store) -> None:
        old = await store.take_lease("a", ttl_s=LONG_S)
        assert old == 1
        ids = [await admitted(store, term=old) for _ in range(64)]  # on every shard
        fresh = new_request()
        await store.new(fresh)
        await store.release_lease("a", term=old)
        assert await store.take_lease("b", ttl_s=LONG_S) == 2
        for id_ in ids:
            assert await store.reassign(id_, term=old, owner="w2", expected_epoch=1) == (
                ReassignAnswer(outcome="stale_term", epoch=1, step=0, owner="w1", attempts=0)
            )
            assert await store.fail(id_, term=old, error="x") == FailAnswer(outcome="stale_term")
        answer = await store.admit(fresh.request_id, term=old, owner="w1")
        assert answer == AdmitAnswer(outcome="stale_term")
        records = await store.load(ids)
        assert {(r.state, r.epoch, r.owner) for r in records if r} == {("active", 1, "w1")}

    @pytest.mark.parametrize("id_", ["missing", "new", "done"])
    async def test_staleness_is_answered_before_anything_else(self, store: Store, id_: str) -> None:
        await store.new(new_request(request_id="new"))
        await admitted(store, request_id="done")
        await store.commit([step_of("done", 1, {0: 2}, finish_reason="stop")])
        await store.take_lease("b", ttl_s=LONG_S, min_term=5)
        assert (await store.admit(id_, term=4, owner="w")).outcome == "stale_term"
        answer = await store.reassign(id_, term=4, owner="w", expected_epoch=1)
        assert answer.outcome == "stale_term"
        assert (await store.fail(id_, term=4, error="x")).outcome == "stale_term"

    async def test_every_write_leaves_its_term(self, store: Store) -> None:
        moved, failed = await admitted(store, term=3), await admitted(store, term=3)
        await store.reassign(moved, term=4, owner="w2", expected_epoch=1)
        await store.fail(failed, term=5, error="x")
        assert (await record_of(store, moved)).term == 4
        assert (await record_of(store, failed)).term == 5

    async def test_workers_and_gateways_need_no_term(self, store: Store) -> None:
        id_ = await admitted(store)
        await store.take_lease("b", ttl_s=LONG_S, min_term=9)
        assert await store.commit([step_of(id_, 1, {0: 7})]) == ["committed"]
        assert (await store.cancel(id_, reason="left")).outcome == "cancelled"
