"""What only a real Valkey server shows: restarts, lost functions, being full or hung, slots."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from dilaserve.embedded import EmbeddedServer, free_port, start_valkey
from dilaserve.errors import SettingsError, StoreUnavailableError
from dilaserve.store import keys
from dilaserve.store.redis import RedisStore, connect_redis
from dilaserve.testing import admitted, canvas_of, new_request, record_of, step_of

OpenStore = Callable[..., Awaitable[RedisStore]]
MakeServer = Callable[..., EmbeddedServer]


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """A Valkey server that the test may stop."""
    async with start_valkey() as server:
        yield server


@pytest.fixture
async def redis(server: EmbeddedServer) -> AsyncIterator[Redis]:
    """A plain client of that server."""
    client = Redis.from_url(server.url, protocol=2)
    yield client
    await client.aclose()


class TestRestart:
    async def test_everything_is_back_under_another_run_id(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url)
        assert await store.take_lease("a", ttl_s=60) == 1
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        before = await record_of(store, id_), await store.deltas(id_), await store.active()
        first_run = await store.run_id()
        await wait_for_disk(server)
        await server.kill()
        await server.start()
        assert await store.run_id() != first_run
        assert (await record_of(store, id_), await store.deltas(id_), await store.active()) == (
            before
        )
        assert await store.renew_lease("a", term=1, ttl_s=60)
        assert await store.commit([step_of(id_, 2, {1: 8})]) == ["committed"]

    async def test_the_functions_are_loaded_again_when_they_are_lost(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        ids = [await admitted(store) for _ in range(3)]
        await redis.function_flush()
        commits = [step_of(id_, 1, {0: 7}) for id_ in ids]
        assert await store.commit(commits) == ["committed"] * 3
        assert await store.commit(commits) == ["duplicate"] * 3

    async def test_an_empty_server_serves_at_once(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store)
        await redis.function_flush()
        await redis.flushall()
        assert await store.commit([step_of(id_, 1, {0: 7})]) == ["terminal"]
        assert await store.take_lease("a", ttl_s=60, min_term=4) == 4
        assert await store.new(new_request())

    async def test_calls_fail_while_it_is_away_and_work_afterwards(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store)
        await wait_for_disk(server)
        await server.kill()
        for call in (
            store.commit([step_of(id_, 1, {0: 7})]),
            store.new(new_request()),
            store.load([id_]),
            store.active(),
            store.take_lease("a", ttl_s=60),
            store.run_id(),
        ):
            with pytest.raises(StoreUnavailableError, match=r"does not serve.*DILASERVE_REDIS_URL"):
                await asyncio.wait_for(call, 5)
        await server.start()
        assert await store.commit([step_of(id_, 1, {0: 7})]) == ["committed"]

    async def test_a_short_outage_is_waited_out(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store)
        await wait_for_disk(server)
        await server.kill()
        committing = asyncio.create_task(store.commit([step_of(id_, 1, {0: 7})]))
        await server.start()
        assert await committing == ["committed"]


class TestStart:
    async def test_waits_for_the_server_to_come_up(
        self, open_store: OpenStore, make_server: MakeServer
    ) -> None:
        server = make_server("valkey")
        connecting = asyncio.create_task(open_store(server.url))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        await server.start()
        store = await connecting
        assert await store.active() == []

    async def test_gives_up_when_no_server_comes_up(self) -> None:
        with pytest.raises(StoreUnavailableError, match="start it, or set DILASERVE_REDIS_URL"):
            await connect_redis(f"redis://127.0.0.1:{free_port()}/0", start_timeout_s=0.3)

    async def test_a_refused_login_is_told_at_once_and_shows_no_password(
        self, open_store: OpenStore, make_server: MakeServer
    ) -> None:
        server = make_server("valkey", "--requirepass", "s3cret")
        await server.start()
        for url in (server.url, server.url.replace("//", "//:wr0ng@")):
            with pytest.raises(SettingsError, match="DILASERVE_REDIS_URL=") as caught:
                await open_store(url)
            assert "wr0ng" not in str(caught.value)
        store = await open_store(server.url.replace("//", "//:s3cret@"))
        assert await store.active() == []

    async def test_a_database_that_the_server_has_not_is_told(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        with pytest.raises(SettingsError, match=r"DILASERVE_REDIS_URL=.* DB index is out of range"):
            await open_store(server.url.removesuffix("/0") + "/99")

    @pytest.mark.parametrize(
        "url",
        ["127.0.0.1:6379", "http://host:1", "redis://host:x/0", "redis://host:1/0?colour=red"],
    )
    async def test_names_the_setting_when_the_url_is_wrong(self, url: str) -> None:
        with pytest.raises(SettingsError, match="DILASERVE_REDIS_URL="):
            await connect_redis(url)

    async def test_the_functions_are_loaded_only_when_they_differ(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        async def n_loads() -> int:
            stats = await redis.info("commandstats")
            return int(stats.get("cmdstat_function|load", {"calls": 0})["calls"])

        for _ in range(3):
            await open_store(server.url)
        assert await n_loads() == 1
        older = "#!lua name=dilaserve\nredis.register_function('dls_new', function() return 7 end)"
        await redis.function_load(older, replace=True)
        store = await open_store(server.url)
        assert await n_loads() == 3
        assert await store.new(new_request()) is True


class TestLimits:
    async def test_full_server_refuses_with_a_remedy_but_ends_requests(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        id_, other = await admitted(store), await admitted(store)
        await store.take_lease("a", ttl_s=60, min_term=2)
        await redis.config_set("maxmemory", "1mb")
        memory = await store.memory()
        assert memory.used > memory.limit == 2**20
        with pytest.raises(StoreUnavailableError, match="full: raise maxmemory"):
            await store.commit([step_of(id_, 1, {0: 7})])
        with pytest.raises(StoreUnavailableError, match="full: raise maxmemory"):
            await store.new(new_request())
        assert await store.renew_lease("a", term=2, ttl_s=60)
        moved = await store.reassign(id_, term=2, owner="w2", expected_epoch=1)
        assert moved.outcome == "reassigned"
        assert (await store.cancel(id_, reason="full")).outcome == "cancelled"
        assert (await store.fail(other, term=2, error="full")).outcome == "failed"
        await redis.config_set("maxmemory", "0")
        assert await store.new(new_request())

    async def test_hung_server_raises_within_the_timeout(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url, timeout_s=0.3)
        id_ = await admitted(store)
        server.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailableError, match="does not serve"):
                await asyncio.wait_for(store.commit([step_of(id_, 1, {0: 7})]), 5)
        finally:
            server.send_signal(signal.SIGCONT)
        [answer] = await store.commit([step_of(id_, 1, {0: 7})])
        assert answer in ("committed", "duplicate")
        assert (await record_of(store, id_)).canvas == canvas_of(p0=7)

    async def test_more_calls_at_once_than_connections(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url)
        ids = [await admitted(store) for _ in range(200)]
        answers = await asyncio.gather(*(store.commit([step_of(i, 1, {0: 1})]) for i in ids))
        assert answers == [["committed"]] * 200


class TestKeys:
    async def test_ended_requests_expire_with_their_streams(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url, retention_s=0.2)
        ids = [await admitted(store) for _ in range(3)]
        await store.commit([step_of(id_, 1, {0: 7}) for id_ in ids])
        await store.cancel(ids[0], reason="left")
        await store.fail(ids[1], term=1, error="poison")
        await store.commit([step_of(ids[2], 2, {1: 2}, finish_reason="stop")])
        assert None not in await store.load(ids)
        await asyncio.sleep(0.4)
        assert await store.load(ids) == [None] * 3
        assert [await store.deltas(id_) for id_ in ids] == [[]] * 3
        left = {key.decode() for key in await redis.keys("*")}
        assert left == {keys.term(keys.shard_of(id_)) for id_ in ids}

    async def test_records_are_readable_but_for_the_token_ids(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store, owner="w1-ab12")
        await store.commit([step_of(id_, 1, {0: 258})])
        fields = await redis.hgetall(keys.record(id_))
        assert fields[b"owner"] == b"w1-ab12"
        assert fields[b"spec"].startswith(b'{"n_output":8,')
        assert fields[b"canvas"] == b"\x02\x01\x00\x00" + b"\xff" * 28
        [(entry_id, entry)] = await redis.xrange(keys.stream(id_))
        assert entry_id == b"1-1"
        assert (entry[b"positions"], entry[b"tokens"]) == (b"[0]", b"[258]")

    async def test_shards_are_even_and_stay_as_they_are(self) -> None:
        counts = [0] * keys.N_SHARDS
        for i in range(16_000):
            counts[keys.shard_of(f"request-{i}")] += 1
        assert min(counts) > 800
        assert max(counts) < 1200
        assert keys.record("r1") == "dlm:{s01}:req:r1"  # stored requests would be lost otherwise

    async def test_a_function_touches_one_slot_of_a_cluster(
        self, open_store: OpenStore, make_server: MakeServer
    ) -> None:
        # Left to itself the server adds 10,000 to its port, which may be no port any more.
        bus_port = str(free_port())
        server = make_server("valkey", "--cluster-enabled", "yes", "--cluster-port", bus_port)
        await server.start()
        async with Redis.from_url(server.url, protocol=2) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            async with asyncio.timeout(10):
                while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                    await asyncio.sleep(0.02)
        store = await open_store(server.url)
        await serve_a_few(store)


async def serve_a_few(store: RedisStore) -> None:
    """Every function of the store, on requests of many shards."""
    assert await store.take_lease("a", ttl_s=60) == 1
    ids = [await admitted(store) for _ in range(40)]
    assert await store.active() == sorted(ids)
    assert set(await store.commit([step_of(id_, 1, {0: 7}) for id_ in ids])) == {"committed"}
    for id_ in ids[:10]:
        moved = await store.reassign(id_, term=1, owner="w2", expected_epoch=1)
        assert moved.outcome == "reassigned"
        assert (await store.cancel(id_, reason="left")).outcome == "cancelled"
    assert (await store.fail(ids[10], term=1, error="x")).outcome == "failed"
    last = [step_of(id_, 2, {1: 2}, finish_reason="stop") for id_ in ids[11:]]
    assert set(await store.commit(last)) == {"committed"}
    assert await store.active() == []
    assert await store.renew_lease("a", term=1, ttl_s=60)
    await store.release_lease("a", term=1)


async def wait_for_disk(server: EmbeddedServer) -> None:
    """Return once all writes so far are in the append-only file as the disk has it."""
    async with Redis.from_url(server.url, protocol=2) as client:
        await client.execute_command("WAITAOF", 1, 0, 5000)


class TestDamage:
    """Somebody else writes into our keys: one bad record must not stop the others."""

    @pytest.mark.parametrize("damage", ["wrong type", "canvas", "spec", "step", "state"])
    async def test_a_damaged_record_counts_as_missing_and_can_be_struck_off(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis, damage: str
    ) -> None:
        store = await open_store(server.url)
        good, bad = await admitted(store), await admitted(store)
        if damage == "wrong type":
            await redis.set(keys.record(bad), "x")
        else:
            await redis.hset(keys.record(bad), damage, "x")
        found = await store.load([bad, good])
        assert found[0] is None
        assert found[1] is not None
        await store.fail(bad, term=1, error="its record is damaged")
        assert await store.active() == [good]

    async def test_a_record_of_the_wrong_type_stops_nobody_elses_commit(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        good, bad = await admitted(store), await admitted(store)
        await redis.set(keys.record(bad), "x")
        outcomes = await store.commit([step_of(bad, 1, {0: 7}), step_of(good, 1, {0: 7})])
        assert outcomes == ["terminal", "committed"]
        assert (await store.reassign(bad, term=1, owner="w", expected_epoch=1)).outcome == "missing"

    async def test_a_deleted_record_leaves_the_active_set_at_the_next_write(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        ids = [await admitted(store) for _ in range(2)]
        await redis.delete(*map(keys.record, ids))
        await store.fail(ids[0], term=1, error="lost")
        await store.cancel(ids[1], reason="lost")
        assert await store.active() == []

    async def test_a_stream_of_the_wrong_type_is_begun_anew(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store)
        await store.commit([step_of(id_, 1, {0: 7})])
        await redis.set(keys.stream(id_), "x")
        assert await store.deltas(id_) == []
        assert await store.commit([step_of(id_, 2, {1: 8})]) == ["committed"]
        assert [delta.step for delta in await store.deltas(id_)] == [2]

    async def test_an_entry_that_is_no_step_is_skipped(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        id_ = await admitted(store)
        await redis.xadd(keys.stream(id_), {"step": "one"}, id="0-5")
        await store.commit([step_of(id_, 1, {0: 7})])
        assert [delta.step for delta in await store.deltas(id_)] == [1]

    @pytest.mark.parametrize("text", ["x", "1e+17"])
    async def test_lease_and_terms_that_are_none_are_taken(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis, text: str
    ) -> None:
        store = await open_store(server.url)
        for key in (keys.LEASE, keys.LEASE_TERM, *map(keys.term, range(keys.N_SHARDS))):
            await redis.set(key, text)
        term = await store.take_lease("a", ttl_s=60)
        assert term is not None
        assert await store.renew_lease("a", term=term, ttl_s=60)

    async def test_a_lease_of_the_wrong_type_is_explained(
        self, open_store: OpenStore, server: EmbeddedServer, redis: Redis
    ) -> None:
        store = await open_store(server.url)
        await redis.lpush(keys.LEASE, "x")
        with pytest.raises(StoreUnavailableError, match=r"another program .* database of its own"):
            await store.take_lease("a", ttl_s=60)

    async def test_a_high_term_is_kept_exactly(
        self, open_store: OpenStore, server: EmbeddedServer
    ) -> None:
        store = await open_store(server.url)
        assert await store.take_lease("a", ttl_s=60, min_term=2**50) == 2**50
        assert await store.renew_lease("a", term=2**50, ttl_s=60)
        await store.release_lease("a", term=2**50)
        assert await store.take_lease("b", ttl_s=60) == 2**50 + 1


async def test_every_cancelled_call_ends_cancelled(
    open_store: OpenStore, server: EmbeddedServer
) -> None:
    store = await open_store(server.url)
    await store.load(["warm"])
    for n_turns in range(40):
        call = asyncio.create_task(store.load(["x"]))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        if not call.done():
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled(), n_turns
