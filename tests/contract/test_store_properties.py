"""Random interleavings of schedulers, workers and clients, against both stores at once.

Every call goes to the memory store and to a real Valkey and must be answered the same; after every
call both must hold the same, and what DESIGN section 3 promises must hold of it. Losses: an answer
that nobody hears, and a server that comes back with an older snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from dilaserve.lifecycle import TRANSITIONS, is_terminal
from dilaserve.messages import FinishReason
from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import MASKED, Commit, DecodingSpec, Delta, RequestRecord
from dilaserve.store.redis import RedisStore, connect_redis
from dilaserve.testing import new_request, step_of

T = TypeVar("T")

IDS = ["a", "b", "c"]
FOR_EVER_S = 1e6
N_TOKENS = 12
SPEC = DecodingSpec(n_output=N_TOKENS, block_length=4, seed=1)
QUICK, LONG = 60, 2000
"""Examples, of 25 to 50 actions each."""

ids = st.sampled_from(IDS)
workers = st.sampled_from(["w1", "w2"])
owners = st.sampled_from(["w1", "w2", ""])
schedulers = st.sampled_from(["newest", "newest", "newest", "other"])
rarely = st.sampled_from([False, False, False, True])
seeds = st.integers(0, 2**16)
positions = st.sets(st.integers(0, N_TOKENS - 1), min_size=1, max_size=3).map(sorted)


ACTIONS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "load": (2, {"name": workers, "id_": ids}),
    "go_on": (12, {"seed": seeds}),
    "step": (
        9,
        {"name": workers, "chosen": st.sets(ids, min_size=1), "unheard": rarely, "seed": seeds},
    ),
    "repeat_last": (2, {"name": workers, "id_": ids}),
    "confused": (
        5,
        {
            "name": workers,
            "id_": ids,
            "at": positions,
            "ahead": st.sampled_from([1, 1, 0, -1, 2]),
            "wrong": st.booleans(),
        },
    ),
    "confused_canvas": (
        2,
        {"name": workers, "id_": ids, "at": positions, "ahead": st.integers(1, 3)},
    ),
    "reassign": (
        9,
        {
            "which": schedulers,
            "id_": ids,
            "owner": owners,
            "died": st.booleans(),
            "late": rarely,
            "unheard": rarely,
        },
    ),
    "admit": (3, {"which": schedulers, "id_": ids, "owner": owners, "unheard": rarely}),
    "take_over": (3, {"which": schedulers}),
    "take_lease": (1, {"which": schedulers, "unheard": st.booleans()}),
    "lease_ends": (1, {"which": schedulers}),
    "save": (3, {}),
    "lose_writes": (4, {}),
    "new": (1, {"id_": ids}),
    "cancel": (1, {"id_": ids}),
    "fail": (1, {"which": schedulers, "id_": ids}),
}
"""Weight and arguments of each action."""

actions = st.sampled_from(
    [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]
).flatmap(lambda name: st.tuples(st.just(name), st.fixed_dictionaries(ACTIONS[name][1])))


def test_both_stores_keep_their_promises(redis_url: str) -> None:
    # a failure is shown as it was found: making it smaller takes minutes, and is for the long run
    explore(redis_url, QUICK, [Phase.explicit, Phase.reuse, Phase.generate])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_stores_keep_their_promises_for_long(redis_url: str) -> None:
    explore(redis_url, LONG, list(Phase))


def explore(url: str, n_examples: int, phases: list[Phase]) -> None:
    with asyncio.Runner() as runner, connected(runner, url) as (store, client):

        @settings(
            max_examples=n_examples,
            phases=phases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(actions, min_size=25, max_size=50))
        def run(script: list[tuple[str, dict[str, Any]]]) -> None:
            play(Interleaving(runner, store, client), script)

        run()


def play(world: Interleaving, script: list[tuple[str, dict[str, Any]]]) -> None:
    world.start()
    for name, arguments in script:
        getattr(world, name)(**arguments)
        world.check()


@contextmanager
def connected(runner: asyncio.Runner, url: str) -> Iterator[tuple[RedisStore, Redis]]:
    store, client = runner.run(connect_redis(url)), Redis.from_url(url, protocol=2)
    try:
        yield store, client
    finally:
        runner.run(store.close())
        runner.run(client.aclose())


def token_at(request_id: str, position: int) -> int:
    """The token that every worker finds there: decoding is deterministic."""
    return hashlib.sha256(f"{request_id}/{position}".encode()).digest()[0]


@dataclass
class Holding:
    """A request as a worker has it."""

    epoch: int
    step: int
    canvas: list[int]
    unanswered: Commit | None = None
    """Sent, and the answer was lost: sent again before anything else."""


@dataclass
class Worker:
    """Epochs that a scheduler has told it, and what it has loaded."""

    granted: dict[str, int] = field(default_factory=dict)
    holds: dict[str, Holding] = field(default_factory=dict)


class Interleaving:
    """Both stores, everybody who uses them, and what they have seen."""

    def __init__(self, runner: asyncio.Runner, redis: RedisStore, client: Redis) -> None:
        self.runner, self.redis, self.client = runner, redis, client
        self.memory = MemoryStore()
        self.terms = {"s1": 0, "s2": 0}
        self.workers = {"w1": Worker(), "w2": Worker()}
        self.seen: dict[str, RequestRecord | None] = dict.fromkeys(IDS)
        self.owner_of: dict[tuple[str, int], str] = {}
        self.committed_by: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.shown: dict[str, dict[int, int]] = defaultdict(dict)
        self.holder = ""
        self.top_term, self.top_epoch = 0, dict.fromkeys(IDS, 0)
        self.lost_writes = False
        self.may_jump = False
        self.saved: tuple[Any, list[tuple[bytes, bytes]]] | None = None

    def start(self) -> None:
        """A scheduler that has admitted the requests, so that steps are not spent on it."""
        self.run(self.client.flushdb())
        for id_ in IDS:
            self.new(id_)
        self.take_over("newest")
        self.save()
        for id_, owner in zip(IDS, ["w1", "w2", "w1"], strict=True):
            self.admit("newest", id_, owner, unheard=False)

    # --- clients -------------------------------------------------------------------------------

    def new(self, id_: str) -> None:
        request = new_request(request_id=id_, spec=SPEC)
        self.both(lambda store: store.new(request, expire_s=FOR_EVER_S))

    def cancel(self, id_: str) -> None:
        self.both(lambda store: store.cancel(id_, reason="left"))

    # --- schedulers: one with an old term is a zombie ------------------------------------------

    def take_lease(self, which: str, unheard: bool) -> None:
        name = self.scheduler(which)
        min_term = self.top_term + 1 if self.lost_writes else 0
        term = self.both(lambda s: s.take_lease(name, ttl_s=FOR_EVER_S, min_term=min_term))
        if term is not None:
            assert term > self.top_term, "terms never go down, nor are they given twice"
            assert self.lost_writes or self.holder in ("", name), "two schedulers hold the lease"
            self.holder = name
            self.top_term = term
            if not unheard:
                self.terms[name] = term

    def lease_ends(self, which: str) -> None:
        name = self.scheduler(which)
        term = self.terms[name]
        renewed = self.both(lambda s: s.renew_lease(name, term=term, ttl_s=FOR_EVER_S))
        assert renewed <= (term == self.top_term or self.lost_writes)
        self.both(lambda s: s.release_lease(name, term=term))
        if term == self.top_term:
            self.holder = ""

    def take_over(self, which: str) -> None:
        """The holder's lease runs out while it goes on, and another takes it."""
        self.lease_ends("newest")
        self.lease_ends("other")
        self.take_lease(which, unheard=False)

    def admit(self, which: str, id_: str, owner: str, unheard: bool) -> None:
        term = self.terms[self.scheduler(which)]
        min_epoch = self.top_epoch[id_] + 1 if self.lost_writes else 1
        answer = self.both(lambda s: s.admit(id_, term=term, owner=owner, min_epoch=min_epoch))
        self.check_term(term, answer.outcome, ("admitted",))
        if answer.outcome == "admitted":
            self.own(id_, answer.epoch, owner)
        if answer.outcome in ("admitted", "already") and not unheard:
            self.grant(id_, answer.epoch, answer.owner)

    def reassign(
        self, which: str, id_: str, owner: str, died: bool, late: bool, unheard: bool
    ) -> None:
        record = self.seen[id_]
        expected = max((record.epoch if record else 0) - late, 0)
        term = self.terms[self.scheduler(which)]
        min_epoch = self.top_epoch[id_] + 1 if self.lost_writes else 0
        answer = self.both(
            lambda s: s.reassign(
                id_,
                term=term,
                owner=owner,
                expected_epoch=expected,
                min_epoch=min_epoch,
                owner_died=died,
            )
        )
        self.check_term(term, answer.outcome, ("reassigned",))
        if answer.outcome == "reassigned":
            assert not late
            self.own(id_, answer.epoch, owner)
        active = record is not None and record.state == "active"
        if answer.outcome in ("reassigned", "conflict") and active and not unheard:
            self.grant(id_, answer.epoch, answer.owner)

    def fail(self, which: str, id_: str) -> None:
        term = self.terms[self.scheduler(which)]
        answer = self.both(lambda s: s.fail(id_, term=term, error="poison"))
        self.check_term(term, answer.outcome, ("failed",))

    # --- workers: they act on epochs that they were told, however old ----------------------------

    def load(self, name: str, id_: str) -> None:
        worker, record = self.workers[name], self.seen[id_]
        if record and record.state == "active" and worker.granted.get(id_) == record.epoch:
            worker.holds[id_] = Holding(record.epoch, record.step, list(record.canvas))

    def step(self, name: str, chosen: set[str], unheard: bool, seed: int) -> None:
        holds = self.workers[name].holds
        for id_ in chosen - holds.keys():
            self.load(name, id_)
        commits = [
            holds[id_].unanswered or self.next_step(name, id_, holds[id_], seed)
            for id_ in sorted(chosen & holds.keys())
        ]
        self.commit(name, [commit for commit in commits if commit], unheard)

    def go_on(self, seed: int) -> None:
        """Each worker steps everything that it was granted."""
        for name in self.workers:
            self.step(name, set(IDS), unheard=False, seed=seed)
            self.check()

    def repeat_last(self, name: str, id_: str) -> None:
        """A repeated commit is never written twice."""
        record, holding = self.seen[id_], self.workers[name].holds.get(id_)
        if record is None or holding is None or holding.unanswered or not record.step:
            return
        commit = step_of(id_, record.step, {0: token_at(id_, 0)}, epoch=holding.epoch)
        [outcome] = self.both(lambda s: s.commit([commit]))
        assert outcome in ("duplicate", "fenced", "terminal")

    def confused(self, name: str, id_: str, at: list[int], ahead: int, wrong: bool) -> None:
        """A worker whose memory does not fit the store's; it too has only epochs of its own."""
        record, epoch = self.seen[id_], self.workers[name].granted.get(id_)
        if record is None or epoch is None:
            return
        if not wrong:
            at = [p for p, token in enumerate(record.canvas) if token == MASKED][: len(at)] or at
        overlaps = any(record.canvas[position] != MASKED for position in at)
        tokens = {p: token_at(id_, p) + (wrong and overlaps) for p in at}
        step = max(1, record.step + ahead)
        commit = step_of(id_, step, tokens, epoch=epoch, worker=name)
        [outcome] = self.both(lambda s: s.commit([commit]))
        assert not (outcome == "committed" and overlaps), "committed tokens never change"
        if outcome == "committed":
            self.accept(name, id_, epoch, tokens)

    def confused_canvas(self, name: str, id_: str, at: list[int], ahead: int) -> None:
        """A whole canvas that masks or changes committed tokens is never taken."""
        record, epoch = self.seen[id_], self.workers[name].granted.get(id_)
        if record is None or epoch is None:
            return
        canvas = [token_at(id_, p) if p in at else MASKED for p in range(N_TOKENS)]
        tokens = {at[0]: canvas[at[0]]}
        commit = step_of(id_, record.step + ahead, tokens, epoch=epoch, canvas=canvas, worker=name)
        self.may_jump = True
        [outcome] = self.both(lambda s: s.commit([commit]))
        forgets = any(s not in (MASKED, c) for s, c in zip(record.canvas, canvas, strict=True))
        assert not (outcome == "committed" and forgets)
        if outcome == "committed":
            self.accept(name, id_, epoch, {p: t for p, t in enumerate(canvas) if t != MASKED})

    # --- the server comes back with an older snapshot ------------------------------------------

    def save(self) -> None:
        self.saved = self.memory.snapshot(), self.run(dump(self.client))

    def lose_writes(self) -> None:
        if self.saved is None:
            return
        self.memory.restore(self.saved[0])
        self.run(restore(self.client, self.saved[1]))
        self.lost_writes = True
        self.seen = self.stored()
        for id_, record in self.seen.items():
            if record is not None:
                self.check_stream(id_, record)

    # --- what must always hold -----------------------------------------------------------------

    def check(self) -> None:
        """What DESIGN section 3 promises; after every action."""
        now = self.stored()
        for id_, record in now.items():
            before = self.seen[id_]
            self.check_record(before, record)
            if record is not None and (before is None or before.step != record.step):
                self.check_stream(id_, record)
        self.seen, self.may_jump = now, False

    def check_stream(self, id_: str, record: RequestRecord) -> None:
        check_replay(record, self.both(lambda s: s.deltas(id_)))
        for position, token in self.shown[id_].items():
            assert record.canvas[position] in (token, MASKED), "shown and taken back"
            assert record.canvas[position] == token or self.lost_writes

    def check_record(self, before: RequestRecord | None, now: RequestRecord | None) -> None:
        if before is None:
            return
        assert now is not None
        if is_terminal(before.state):
            assert now == before, "what has ended stays as it is"
        assert now.request == before.request
        assert now.epoch >= before.epoch
        assert now.term >= before.term
        assert now.attempts >= before.attempts
        assert before.step <= now.step
        assert now.step <= before.step + 1 or self.may_jump
        assert all(b in (MASKED, n) for b, n in zip(before.canvas, now.canvas, strict=True))
        moves = {to for (state, _), to in TRANSITIONS.items() if state == before.state}
        assert now.state in moves | {before.state}

    # --- helpers -------------------------------------------------------------------------------

    def scheduler(self, which: str) -> str:
        first, second = sorted(self.terms, key=lambda name: -self.terms[name])
        return first if which == "newest" else second

    def next_step(self, name: str, id_: str, holding: Holding, seed: int) -> Commit | None:
        masked = [p for p, token in enumerate(holding.canvas) if token == MASKED]
        if not masked:
            return None
        chance = random.Random(f"{seed} {id_} {holding.step}")
        chosen = sorted(chance.sample(masked, min(len(masked), chance.randint(1, 3))))
        tokens = {p: token_at(id_, p) for p in chosen}
        for position, token in tokens.items():
            holding.canvas[position] = token
        holding.step += 1
        finish: FinishReason | None = "length" if len(chosen) == len(masked) else None
        if chance.random() < 0.15:
            finish = "stop"  # an EOS token: the rest stays masked
        return step_of(
            id_,
            holding.step,
            tokens,
            epoch=holding.epoch,
            worker=name,
            finish_reason=finish,
        )

    def commit(self, name: str, commits: list[Commit], unheard: bool) -> None:
        holds = self.workers[name].holds
        self.may_jump = any(commit.canvas for commit in commits)
        outcomes = self.both(lambda s: s.commit(commits))
        for commit, outcome in zip(commits, outcomes, strict=True):
            holding = holds[commit.request_id]
            if outcome == "committed":
                tokens = dict(zip(commit.positions, commit.tokens, strict=True))
                self.accept(name, commit.request_id, commit.epoch, tokens)
            if unheard:
                holding.unanswered = commit
            elif outcome == "gap":
                assert commit.canvas is None
                holding.unanswered = step_of(
                    commit.request_id,
                    commit.step,
                    dict(zip(commit.positions, commit.tokens, strict=True)),
                    epoch=commit.epoch,
                    worker=name,
                    finish_reason=commit.finish_reason,
                    canvas=list(holding.canvas),
                )
            elif outcome in ("fenced", "terminal") or commit.finish_reason:
                del holds[commit.request_id]
            else:
                holding.unanswered = None

    def accept(self, name: str, id_: str, epoch: int, tokens: dict[int, int]) -> None:
        record = self.seen[id_]
        assert record is not None
        assert (record.state, record.epoch) == ("active", epoch), "a fence held nobody off"
        self.committed_by[id_, epoch].add(name)
        assert self.committed_by[id_, epoch] <= {self.owner_of[id_, epoch]}
        self.shown[id_].update(tokens)

    def own(self, id_: str, epoch: int, owner: str) -> None:
        assert epoch > self.top_epoch[id_], "no epoch is given to two owners"
        self.top_epoch[id_] = epoch
        self.owner_of[id_, epoch] = owner

    def grant(self, id_: str, epoch: int, owner: str) -> None:
        if owner:
            self.workers[owner].granted[id_] = epoch

    def check_term(self, term: int, outcome: str, written: tuple[str, ...]) -> None:
        if not self.lost_writes:
            assert (outcome == "stale_term") == (term < self.top_term)
        if outcome in written:
            assert term == self.top_term or self.lost_writes

    def stored(self) -> dict[str, RequestRecord | None]:
        records = dict(zip(IDS, self.both(lambda s: s.load(IDS)), strict=True))
        active = [id_ for id_, record in records.items() if record and record.state == "active"]
        assert self.both(lambda s: s.active()) == active
        return records

    def both(self, call: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        in_memory, in_redis = self.run(call(self.memory)), self.run(call(self.redis))
        assert _timeless(in_memory) == _timeless(in_redis)
        return in_memory

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)


def _timeless(answer: Any) -> Any:
    """Two clocks do not agree about when a request ended, but about whether it did."""
    if isinstance(answer, list):
        return [_timeless(each) for each in answer]
    if isinstance(answer, RequestRecord) and answer.ended_s is not None:
        return msgspec.structs.replace(answer, ended_s=0.0)
    return answer


def check_replay(record: RequestRecord, deltas: list[Delta]) -> None:
    """The stream, replayed, is the canvas."""
    canvas = [MASKED] * len(record.canvas)
    for delta in deltas:
        for position, token in zip(delta.positions, delta.tokens, strict=True):
            assert canvas[position] == MASKED, "each position is unmasked once"
            canvas[position] = token
        assert len(delta.confidences) == len(delta.positions)
    assert canvas == record.canvas
    steps = [delta.step for delta in deltas]
    assert steps == sorted(set(steps))
    assert (steps[-1] if steps else 0) == record.step
    epochs = [delta.epoch for delta in deltas]
    assert epochs == sorted(epochs)


async def dump(client: Redis) -> list[tuple[bytes, bytes]]:
    keys = await client.keys("*")
    return [(key, await client.dump(key)) for key in keys]


async def restore(client: Redis, dumped: list[tuple[bytes, bytes]]) -> None:
    await client.flushdb()
    for key, value in dumped:
        await client.restore(key, 0, value)
