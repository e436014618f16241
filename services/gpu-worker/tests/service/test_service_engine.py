"""The service around the real engine: the same text as the bare engine, whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest

from dilaserve.bus.memory import MemoryBroker
from dilaserve.messages import Release, StepItem
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest

THRESHOLD = 0.6
REQUESTS = {
    "greedy": ([5, 6, 7, 8, 9], DecodingSpec(n_output=32, block_length=8, seed=1)),
    "short last block": ([11], DecodingSpec(n_output=20, block_length=16, seed=2)),
    "sampled": (
        [30, 31, 32] * 4,
        DecodingSpec(n_output=24, block_length=8, seed=3, temperature=1.0),
    ),
    "sampled, cut": (
        [40, 41],
        DecodingSpec(n_output=32, block_length=16, seed=4, temperature=0.7, top_p=0.9),
    ),
    "to the end": ([50], DecodingSpec(n_output=16, block_length=8, seed=5, ignore_eos=True)),
}


@pytest.fixture(params=["dual", "prefix", "none", "dream"])
def make_engine(request, model, random_dream):
    if request.param == "dream":
        return lambda: build(random_dream, "dual")
    return lambda: build(model, request.param)


def build(model, cache_mode: str) -> Engine:
    return Engine(model, cache_mode=cache_mode, n_kv_tokens=4096, max_batch_tokens=512)


def alone(engine: Engine, name: str) -> list[int]:
    """The canvas that the bare engine gives a request on its own."""
    prompt, spec = REQUESTS[name]
    engine.add(
        EngineRequest(
            request_id=name,
            prompt=prompt,
            spec=spec,
            step=0,
            canvas=[MASKED] * spec.n_output,
            credit=Credit(THRESHOLD, 99),
        )
    )
    while engine.step():
        pass
    return engine.canvas(name)


async def submit(rig) -> None:
    for name, (prompt, spec) in REQUESTS.items():
        await rig.new(name, prompt=prompt, spec=spec)


async def test_the_text_is_that_of_the_bare_engine(make_rig, make_engine):
    rig = await make_rig(engine=make_engine())
    await submit(rig)
    for name in REQUESTS:
        await rig.credit(name, threshold=THRESHOLD)
        await asyncio.sleep(0.003)
    await rig.until(lambda: sum(d.finish_reason is not None for d in rig.deltas) == len(REQUESTS))
    for name in REQUESTS:
        assert (await rig.record(name)).canvas == alone(make_engine(), name), name
    await rig.quiet()
    assert rig.held() == {}
    assert rig.heartbeats[-1].n_free_kv_tokens in (4096, 0)


async def test_a_move_in_the_middle_of_a_block_changes_no_statistic(make_rig, make_engine):
    """The new worker has the confidences of what is committed from the request's stream."""
    prompt, spec = REQUESTS["greedy"]
    undisturbed = await make_rig(instance_id="calm-0001", engine=make_engine())
    await undisturbed.new("r", prompt=prompt, spec=spec)
    await undisturbed.credit("r", threshold=THRESHOLD)
    await undisturbed.until(lambda: undisturbed.deltas and undisturbed.deltas[-1].finish_reason)
    broker = MemoryBroker()
    one = await make_rig(instance_id="one-0001", broker=broker, engine=make_engine())
    two = await make_rig(
        instance_id="two-0002", broker=broker, store=one.store, engine=make_engine()
    )
    await one.new("r", prompt=prompt, spec=spec)
    for epoch, step in enumerate([2, 3, 5, 9, None], start=1):
        rig = (two, one)[epoch % 2]
        await rig.credit("r", epoch=epoch, threshold=THRESHOLD, until_step=step)
        if step is not None:
            await one.until(lambda last=step: last in one.steps("r"))
            target = (one, two)[epoch % 2].instance_id
            await one.store.reassign("r", term=1, owner=target, expected_epoch=epoch)
    await one.until(lambda: one.deltas[-1].finish_reason)
    stats = {item.step: item.confidence for item in one.items + two.items}
    assert stats == {item.step: item.confidence for item in undisturbed.items}
    assert len(stats) > 9


@pytest.mark.parametrize("seed", range(6))
async def test_moves_losses_and_outages_change_no_text(make_rig, model, seed):
    """Two workers, and a scheduler that loses messages, moves requests at any moment and sees the
    store answer late, twice, not at all, or with its last steps lost."""
    chance = random.Random(seed)
    broker = MemoryBroker()
    one = await make_rig(instance_id="one-0001", broker=broker, engine=build(model, "dual"))
    two = await make_rig(
        instance_id="two-0002", broker=broker, store=one.store, engine=build(model, "dual")
    )
    world = World(chance, one.store, {rig.instance_id: rig for rig in (one, two)})
    await submit(one)
    for _ in range(60):
        await world.happen()
        await asyncio.sleep(chance.uniform(0, 0.01))
    one.store.down = False
    while not await world.all_done():
        await world.command_everything()
        await asyncio.sleep(0.02)
    one.store.lose_answers = 0  # a loss that met no call is not to meet ours
    for name in REQUESTS:
        text = alone(build(model, "dual"), name)
        assert (await one.record(name)).canvas == text, name
        for delta in one.deltas:
            if delta.request_id == name:
                assert delta.tokens == [text[position] for position in delta.positions]


class World:
    """What can go wrong between a scheduler, two workers and a store."""

    def __init__(self, chance, store, rigs) -> None:
        self.chance = chance
        self.store = store
        self.rigs = rigs
        self.epochs = dict.fromkeys(REQUESTS, 1)
        self.snapshot = None

    async def happen(self) -> None:
        events = [self.credit, self.credit, self.move, self.move, self.stutter, self.outage]
        events += [self.save, self.lose_steps]
        await self.chance.choice(events)()

    async def credit(self) -> None:
        name = self.chance.choice(list(REQUESTS))
        if self.store.down:
            return
        record = await self.record(name)
        await self.send(record, until_step=record.step + self.chance.randint(1, 4))

    async def move(self) -> None:
        name = self.chance.choice(list(REQUESTS))
        if self.store.down:
            return
        old = await self.record(name)
        target = self.chance.choice(list(self.rigs))
        if self.chance.random() < 0.5:
            await self.send(old)
        answer = await self.reassign(name, old.epoch, target)
        if answer.outcome != "reassigned":
            return
        self.epochs[name] = answer.epoch
        if self.chance.random() < 0.5:
            release = Release(request_id=name, epoch=old.epoch)
            await self.rigs[old.owner].command(releases=[release])
        if self.chance.random() < 0.8:
            await self.send(await self.record(name))

    async def reassign(self, name, epoch, target):
        # a lost answer has to be read again, as a scheduler does
        lost, self.store.lose_answers = self.store.lose_answers, 0
        answer = await self.store.reassign(
            name, term=1, owner=target, expected_epoch=epoch, min_epoch=self.epochs[name] + 1
        )
        self.store.lose_answers = lost
        return answer

    async def stutter(self) -> None:
        self.store.lose_answers += 1

    async def outage(self) -> None:
        self.store.down = self.chance.random() < 0.5

    async def save(self) -> None:
        self.snapshot = self.store.snapshot()

    async def lose_steps(self) -> None:
        """The store restarts with older data; the scheduler raises the epochs, as it must."""
        if self.snapshot is None or self.store.down:
            return
        self.store.restore(self.snapshot)
        self.snapshot = None
        for name in REQUESTS:
            record = await self.record(name)
            answer = await self.reassign(name, record.epoch, record.owner)
            if answer.outcome == "reassigned":
                self.epochs[name] = answer.epoch

    async def record(self, name):
        lost, self.store.lose_answers = self.store.lose_answers, 0
        record = (await self.store.load([name]))[0]
        self.store.lose_answers = lost
        return record

    async def send(self, record, until_step=None) -> None:
        item = StepItem(
            request_id=record.request.request_id,
            epoch=record.epoch,
            threshold=THRESHOLD,
            until_block=99,
            until_step=until_step,
        )
        await self.rigs[record.owner].command(item)

    async def command_everything(self) -> None:
        for name in REQUESTS:
            await self.send(await self.record(name))

    async def all_done(self) -> bool:
        return all([(await self.record(name)).state == "done" for name in REQUESTS])
