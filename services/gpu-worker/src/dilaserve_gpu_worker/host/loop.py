"""What runs in the engine's process: orders, then a pass, then its report, and so on.

Knows no pipe: orders come through a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from dilaserve.crashpoints import CrashPoints
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest
from dilaserve_gpu_worker.holdings import RequestEngine
from dilaserve_gpu_worker.host.orders import (
    Add,
    Allow,
    End,
    Ended,
    Idle,
    Limit,
    Order,
    PassDone,
    Remove,
    Report,
    SetCredit,
)

__all__ = ["EngineLoop", "Orders", "PassEngine"]

PlanT = TypeVar("PlanT")
LogitsT = TypeVar("LogitsT")

Orders = SimpleQueue[Sequence[Order] | None]
"""None: nobody is there any more who could give some."""

_WARM_UP = "warm-up"


class PassEngine(RequestEngine, Protocol[PlanT, LogitsT]):
    """The engine as the loop uses it; `PlanT` and `LogitsT` are its own business."""

    @property
    def n_free_kv_tokens(self) -> int:
        """Tokens of the KV pool that no request holds."""
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


class EngineLoop(Generic[PlanT, LogitsT]):
    """Runs as many passes as it is allowed, one at a time."""

    def __init__(
        self,
        engine: PassEngine[PlanT, LogitsT],
        orders: Orders,
        say: Callable[[Report], None],
        crash: CrashPoints,
    ) -> None:
        self._engine = engine
        self._orders = orders
        self._say = say
        self._crash = crash
        self._n_allowed = 0
        self._n_orders = 0
        self._n_free_said = engine.n_free_kv_tokens

    def warm_up(self, block_length: int) -> None:
        """Run two steps of a request of one block, so that the first client does not wait for
        what a first pass sets up. Raises what the engine raises: it could not serve either."""
        self._engine.add(_warm_up_request(block_length))
        for _ in range(2):
            plan = self._engine.plan()
            if plan is not None:
                self._engine.unmask(plan, self._engine.forward(plan))
        self._engine.remove(_WARM_UP)

    def run(self) -> None:
        """Until it is told to end. Raises what the engine raises."""
        waits = True
        while self._obey(waits):
            plan = self._engine.plan() if self._n_allowed else None
            waits = plan is None
            if plan is None:
                self._say_what_is_free()
            else:
                self._pass(plan)
        self._say(Ended())

    def _pass(self, plan: PlanT) -> None:
        self._n_allowed -= 1
        self._crash.reach("worker.before_forward")
        logits = self._engine.forward(plan)
        self._crash.reach("worker.after_forward")
        output = self._engine.unmask(plan, logits)
        self._n_free_said = self._engine.n_free_kv_tokens
        self._say(
            PassDone(output=output, n_orders=self._n_orders, n_free_kv_tokens=self._n_free_said)
        )

    def _say_what_is_free(self) -> None:
        if self._engine.n_free_kv_tokens != self._n_free_said:
            self._n_free_said = self._engine.n_free_kv_tokens
            self._say(Idle(n_free_kv_tokens=self._n_free_said))

    def _obey(self, waits: bool) -> bool:
        """All orders that are there, or the next ones that come; False when it is time to end."""
        while True:
            try:
                orders = self._orders.get(waits)
            except Empty:
                return True
            waits = False
            if orders is None or not all(map(self._obey_one, orders)):
                return False

    def _obey_one(self, order: Order) -> bool:
        self._n_orders += 1
        match order:
            case Add():
                self._engine.add(order.request)
            case SetCredit():
                self._engine.set_credit(order.request_id, order.credit)
            case Limit():
                self._engine.limit_recomputes(order.n_tokens)
            case Remove():
                self._engine.remove(order.request_id)
            case Allow():
                self._n_allowed += 1
            case End():
                return False
        return True


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
