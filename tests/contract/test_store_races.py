"""Schedulers, workers and a client at the same time on one store, calls cut off in the middle."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from dilaserve.errors import StoreUnavailableError
from dilaserve.lifecycle import is_terminal
from dilaserve.store import Store
from dilaserve.store.records import MASKED, Commit, DecodingSpec, RequestRecord
from dilaserve.testing import new_request, record_of, step_of

N_REQUESTS = 10
N_TOKENS = 40
LIMIT_S = 60.0
SPEC = DecodingSpec(n_output=N_TOKENS, block_length=8, seed=1)


@dataclass
class Cluster:
    """What the actors tell one another, as messages would."""

    store: Store
    chance: random.Random
    ids: list[str]
    granted: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Worker → request → epoch."""
    owners: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    accepted: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))

    outcomes: Counter[str] = field(default_factory=Counter)

    async def ended(self) -> bool:
        records = await self.store.load(self.ids)
        return all(record and is_terminal(record.state) for record in records)


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_and_every_stream_is_whole(store: Store, seed: int) -> None:
    ids = [f"race-{i}" for i in range(N_REQUESTS)]
    cluster = Cluster(store, random.Random(seed), ids)
    for id_ in ids:
        await store.new(new_request(request_id=id_, spec=SPEC))
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(
            scheduler(cluster, "s1"),
            scheduler(cluster, "s2"),
            worker(cluster, "w1"),
            worker(cluster, "w2"),
            worker(cluster, "w3"),
            client(cluster),
        )
    records = [await check(cluster, id_) for id_ in ids]
    assert await store.active() == []
    assert max(record.epoch for record in records) > 1, "requests were moved about"
    assert cluster.outcomes["fenced"] > 3
    assert cluster.outcomes["gap"] == 0, "nothing was lost"
    assert cluster.outcomes["duplicate"] + cluster.outcomes["terminal"] > 0


async def scheduler(cluster: Cluster, name: str) -> None:
    """Takes the lease, moves requests about, and goes on for a while after it has lost it."""
    while not await cluster.ended():
        term = await cluster.store.take_lease(name, ttl_s=cluster.chance.uniform(0.01, 0.05))
        if term is None:
            await asyncio.sleep(0.005)
            continue
        for _ in range(cluster.chance.randint(5, 40)):
            await cut_off(cluster, decide(cluster, name, term))


async def decide(cluster: Cluster, name: str, term: int) -> None:
    id_, owner = cluster.chance.choice(cluster.ids), cluster.chance.choice(["w1", "w2", "w3"])
    record = await record_of(cluster.store, id_)
    if record.state == "new":
        admission = await cluster.store.admit(id_, term=term, owner=owner)
        if admission.outcome in ("admitted", "already"):
            grant(cluster, id_, admission.epoch, admission.owner)
    elif record.state == "active" and cluster.chance.random() < 0.3:
        move = await cluster.store.reassign(
            id_, term=term, owner=owner, expected_epoch=record.epoch
        )
        if move.outcome == "reassigned":
            grant(cluster, id_, move.epoch, move.owner)
    elif record.state == "active" and record.owner:
        grant(cluster, id_, record.epoch, record.owner)  # the command was lost: send it again


def grant(cluster: Cluster, id_: str, epoch: int, owner: str) -> None:
    cluster.owners[id_, epoch].add(owner)
    cluster.granted[owner][id_] = epoch


async def worker(cluster: Cluster, name: str) -> None:
    """Steps everything it was granted, in batches, with whatever epoch it knows."""
    canvases: dict[tuple[str, int], tuple[int, list[int]]] = {}
    while not await cluster.ended():
        await asyncio.sleep(0)
        for id_, epoch in list(cluster.granted[name].items()):
            if (id_, epoch) not in canvases:
                record = await record_of(cluster.store, id_)
                canvases[id_, epoch] = record.step, record.canvas
        held = [(id_, e) for id_, e in cluster.granted[name].items() if (id_, e) in canvases]
        commits = [next_step(cluster, name, key, *canvases[key]) for key in held]
        if commits:
            await cut_off(cluster, send(cluster, name, commits, canvases))


def next_step(
    cluster: Cluster, name: str, key: tuple[str, int], step: int, canvas: list[int]
) -> Commit:
    id_, epoch = key
    masked = [p for p, token in enumerate(canvas) if token == MASKED] or [0]
    position = cluster.chance.choice(masked)
    return step_of(
        id_,
        step + 1,
        {position: cluster.chance.randrange(1000)},
        epoch=epoch,
        worker=name,
        finish_reason="length" if len(masked) == 1 else None,
    )


async def send(
    cluster: Cluster,
    name: str,
    commits: list[Commit],
    canvases: dict[tuple[str, int], tuple[int, list[int]]],
) -> None:
    outcomes = await cluster.store.commit(commits)
    for commit, outcome in zip(commits, outcomes, strict=True):
        id_, epoch = commit.request_id, commit.epoch
        cluster.outcomes[outcome] += 1
        if outcome == "committed":
            cluster.accepted[id_, epoch].add(name)
        del canvases[id_, epoch]  # read it again: somebody else may have gone on


async def client(cluster: Cluster) -> None:
    """Leaves a few requests at some moment."""
    for id_ in cluster.chance.sample(cluster.ids, 3):
        await asyncio.sleep(cluster.chance.uniform(0, 0.1))
        await cluster.store.cancel(id_, reason="left")


async def cut_off(cluster: Cluster, call: object) -> None:
    """Carry out a call, but sometimes lose patience in the middle: nobody hears the answer."""
    await asyncio.sleep(0)  # let the others go on: calls of the memory store never wait
    patience_s = cluster.chance.choice([5.0, 5.0, 5.0, 0.0002, 0.001])
    try:
        async with asyncio.timeout(patience_s):
            await call  # type: ignore[misc]
    except (TimeoutError, StoreUnavailableError):
        return


async def check(cluster: Cluster, id_: str) -> RequestRecord:
    record, deltas = await record_of(cluster.store, id_), await cluster.store.deltas(id_)
    canvas = [MASKED] * N_TOKENS
    for delta in deltas:
        for position, token in zip(delta.positions, delta.tokens, strict=True):
            assert canvas[position] == MASKED
            canvas[position] = token
    assert canvas == record.canvas
    assert [delta.step for delta in deltas] == list(range(1, record.step + 1))
    assert [d.epoch for d in deltas] == sorted(d.epoch for d in deltas)
    for delta in deltas:
        assert cluster.owners[id_, delta.epoch] <= {delta.worker}
        assert cluster.accepted[id_, delta.epoch] <= {delta.worker}
    assert is_terminal(record.state)
    assert (record.state == "done") == (MASKED not in record.canvas)
    return record
