"""Runs the engine's forward passes in a thread of their own, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from dilaserve.crashpoints import CrashPoints
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest
from dilaserve_gpu_worker.holdings import RequestEngine

__all__ = ["PassEngine", "Passes"]

PlanT = TypeVar("PlanT")
LogitsT = TypeVar("LogitsT")

_WARM_UP = "warm-up"


class PassEngine(RequestEngine, Protocol[PlanT, LogitsT]):
    """The engine as the service uses it; `PlanT` and `LogitsT` are its own business."""

    @property
    def n_free_kv_tokens(self) -> int:
        """Tokens of the KV pool that no request holds."""
        ...

    def has_work(self) -> bool:
        """Whether any held request may run a step."""
        ...

    def plan(self) -> PlanT | None:
        """Choose the rows of the next pass; None if none can run."""
        ...

    def forward(self, plan: PlanT) -> LogitsT:
        """Run the model."""
        ...

    def unmask(self, plan: PlanT, logits: LogitsT) -> BatchOutput:
        """Decide tokens, and apply them to the engine's own canvases."""
        ...


class Passes(Generic[PlanT, LogitsT]):
    """One pass at a time. While one runs, nobody else may touch the engine."""

    def __init__(self, engine: PassEngine[PlanT, LogitsT], crash: CrashPoints) -> None:
        self._engine = engine
        self._crash = crash
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def run(self) -> BatchOutput | None:
        """Plan, forward, unmask; None if there was nothing to run."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run)

    async def warm_up(self, block_length: int) -> None:
        """Run two steps of a request of one block, so that the first client does not wait for
        what a first pass sets up. Raises what the engine raises: it could not serve either."""
        self._engine.add(_warm_up_request(block_length))
        for _ in range(2):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._run_unarmed)
        self._engine.remove(_WARM_UP)

    def close(self) -> None:
        """Wait for the pass in flight, and end the thread."""
        self._thread.shutdown()

    def _run(self) -> BatchOutput | None:
        plan = self._engine.plan()
        if plan is None:
            return None
        self._crash.reach("worker.before_forward")
        logits = self._engine.forward(plan)
        self._crash.reach("worker.after_forward")
        return self._engine.unmask(plan, logits)

    def _run_unarmed(self) -> None:
        plan = self._engine.plan()
        if plan is not None:
            self._engine.unmask(plan, self._engine.forward(plan))


def _warm_up_request(block_length: int) -> EngineRequest:
    return EngineRequest(
        request_id=_WARM_UP,
        prompt=[0],
        spec=DecodingSpec(
            n_output=block_length, block_length=block_length, seed=0, ignore_eos=True
        ),
        step=0,
        canvas=[MASKED] * block_length,
        credit=Credit(threshold=1.0, until_block=0),
    )
