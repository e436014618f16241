"""What arrives together is evaluated together, and the loop never waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from dilaserve.messages import PredictSteps, StepsPredicted
from dilaserve_predictor.batching import Batcher
from dilaserve_predictor.predicting import nothing_known


def query(name: str) -> PredictSteps:
    return PredictSteps(model_id=name, thresholds=[0.9], questions=[])


class Trees:
    """Slow ones: each evaluation waits for `go`."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, queries: Sequence[PredictSteps]) -> list[StepsPredicted]:
        self.batches.append([each.model_id for each in queries])
        assert self.go.acquire(timeout=5)
        if self.error is not None:
            raise self.error
        return [nothing_known(each) for each in queries]


@asynccontextmanager
async def running(trees: Trees) -> AsyncIterator[Batcher]:
    batcher = Batcher(trees)
    task = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        trees.go.release()
        task.cancel()


async def until_batches(trees: Trees, n: int) -> None:
    async with asyncio.timeout(5):
        while len(trees.batches) < n:
            await asyncio.sleep(0.001)


async def test_what_arrives_while_the_trees_are_busy_is_one_batch() -> None:
    trees = Trees()
    async with running(trees) as batcher:
        first = asyncio.create_task(batcher.ask(query("a")))
        await until_batches(trees, 1)
        others = [asyncio.create_task(batcher.ask(query(name))) for name in "bcd"]
        await asyncio.sleep(0)
        for _ in range(2):
            trees.go.release()
        answers = await asyncio.gather(first, *others)
    assert trees.batches == [["a"], ["b", "c", "d"]]
    assert [answer.model_id for answer in answers] == ["a", "b", "c", "d"]


async def test_an_error_reaches_those_of_its_batch_alone() -> None:
    trees = Trees()
    trees.error = ValueError("no")
    async with running(trees) as batcher:
        trees.go.release()
        with pytest.raises(ValueError, match="no"):
            await batcher.ask(query("a"))
        trees.error = None
        trees.go.release()
        assert (await batcher.ask(query("b"))).model_id == "b"


async def test_whoever_waits_no_more_does_no_harm() -> None:
    trees = Trees()
    async with running(trees) as batcher:
        gone = asyncio.create_task(batcher.ask(query("a")))
        await until_batches(trees, 1)
        gone.cancel()
        for _ in range(2):
            trees.go.release()
        assert (await batcher.ask(query("b"))).model_id == "b"
