"""The engine as the service sees it: orders go out, passes come back. Knows no pipe."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from dilaserve_gpu_worker.engine.types import (
    BatchOutput,
    Credit,
    EngineLostError,
    EngineRequest,
)
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.host.orders import (
    Add,
    Allow,
    End,
    Ended,
    Idle,
    Limit,
    Lost,
    Order,
    PassDone,
    Ping,
    Remove,
    Report,
    SetCredit,
)

__all__ = ["EnginePort"]

N_SILENT = 4
"""Unanswered pings after which an engine counts as silent."""


class EnginePort:
    """Belongs to the running event loop. `send` takes pings, and orders; those of one turn of the
    loop go together. `limits` are what the engine has room for when it is empty."""

    def __init__(self, limits: Limits, send: Callable[[Sequence[Order] | Ping], None]) -> None:
        self._limits = limits
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._wake: Callable[[], None] = lambda: None
        self._waiting: list[Order] = []
        self._n_orders = 0
        self._added: dict[str, int] = {}
        """Which order added a request."""
        self._passes: deque[PassDone] = deque()
        self._lost: EngineLostError | None = None
        self._n_pings = 0
        self.has_ended = False
        """Whether no more passes come."""
        self.n_free_kv_tokens = limits.n_kv_tokens or 0
        """Tokens of the KV pool that no request held when the engine last said so."""

    @property
    def is_silent(self) -> bool:
        """Whether the last few pings brought no answer."""
        return self._n_pings > N_SILENT

    def on_report(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something has been heard."""
        self._wake = wake

    # --- to the engine: obeyed after the pass under way -----------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Hold a request. Raises NeverFitsError, InvalidRequestError."""
        self._limits.check(request)
        self._put(Add(request))
        self._added[request.request_id] = self._n_orders

    def set_credit(self, request_id: str, credit: Credit) -> None:
        """Replace the credit of a held request."""
        self._put(SetCredit(request_id, credit))

    def limit_recomputes(self, n_tokens: int | None) -> None:
        """Most tokens of the rows of a pass that compute their whole length; None: no limit."""
        self._put(Limit(n_tokens))

    def remove(self, request_id: str) -> None:
        """Forget a request and free its KV."""
        self._added.pop(request_id, None)
        self._put(Remove(request_id))

    def allow(self) -> None:
        """Let one more pass run, as soon as there is work for it."""
        self._put(Allow())

    def end(self) -> None:
        """Let no more passes run; `has_ended` tells when the one under way has come back."""
        self._put(End())

    def ping(self) -> bool:
        """Ask whether its process runs; False when the last few times brought no answer."""
        self._n_pings += 1
        self._send(Ping())
        return not self.is_silent

    def _put(self, order: Order) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(order)
        self._n_orders += 1

    def _flush(self) -> None:
        orders, self._waiting = self._waiting, []
        self._send(orders)

    # --- from the engine ------------------------------------------------------------------------

    def heard(self, report: Report) -> None:
        """The engine has said something."""
        self._n_pings = 0
        match report:
            case PassDone():
                self._passes.append(report)
                self.n_free_kv_tokens = report.n_free_kv_tokens
            case Idle():
                self.n_free_kv_tokens = report.n_free_kv_tokens
            case Lost():
                self._lost, self.has_ended = EngineLostError(report.reason), True
            case Ended():
                self.has_ended = True
        self._wake()

    def take(self) -> BatchOutput | None:
        """The oldest pass that has not been taken; None when there is none. Raises EngineLostError
        behind the last one of an engine that was lost."""
        if self._passes:
            return self._current(self._passes.popleft())
        if self._lost is not None:
            raise self._lost
        return None

    def _current(self, done: PassDone) -> BatchOutput:
        """Without steps of a request that has been removed, and added again, since it began."""
        steps = done.output.steps
        current = [s for s in steps if self._added.get(s.request_id, 0) <= done.n_orders]
        return done.output if len(current) == len(steps) else replace(done.output, steps=current)
