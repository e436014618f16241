"""Collects what is asked while the trees are busy, and evaluates it together on a worker thread, so
that the event loop never waits for them. Knows no bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dilaserve.messages import PredictSteps, StepsPredicted

__all__ = ["Batcher"]

Predict = Callable[[Sequence[PredictSteps]], list[StepsPredicted]]


class Batcher:
    """Answers queries in batches, one at a time. `predict` runs on the thread."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trees")
        self._waiting: list[tuple[PredictSteps, asyncio.Future[StepsPredicted]]] = []
        self._wake = asyncio.Event()

    async def ask(self, query: PredictSteps) -> StepsPredicted:
        """The answer; raises what `predict` raised."""
        answer: asyncio.Future[StepsPredicted] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, answer))
        self._wake.set()
        return await answer

    async def run(self) -> None:
        """Evaluate batch after batch, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self._waiting = self._waiting, []
                call = loop.run_in_executor(self._thread, self._predict, [q for q, _ in batch])
                await asyncio.wait([call])
                _hand_out(call, [answer for _, answer in batch])
        finally:
            self._thread.shutdown(wait=False)


def _hand_out(
    call: asyncio.Future[list[StepsPredicted]], futures: Sequence[asyncio.Future[StepsPredicted]]
) -> None:
    error = call.exception()
    for n, future in enumerate(futures):
        if future.done():  # whoever asked waits no more
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(call.result()[n])
