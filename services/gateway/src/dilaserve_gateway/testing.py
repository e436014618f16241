"""Fakes for tests: a scripted scheduler and worker in memory, and an application on real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from dilaserve import subjects
from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.messages import (
    Admitted,
    Cancel,
    Cancelled,
    ConfidenceStats,
    FinishReason,
    Refused,
    Submit,
    TokenDelta,
    decode_request,
    encode,
)
from dilaserve.store import Store
from dilaserve.store.records import Commit, NewRequest
from dilaserve_gateway.listening import HttpServer, listen, url_of
from dilaserve_gateway.model import ServedModel

CONFIDENCE = 0.875
"""Of every token that the fake unmasks."""
WORKER = "worker-0000"
_STATS = ConfidenceStats(min=0.5, q25=0.6, median=0.7, mean=0.7, q75=0.8)

Step = Sequence[tuple[int, int]]
"""(position, token) pairs, positions ascending."""


def shuffle_steps(tokens: Sequence[int]) -> list[Step]:
    """Two neighbours a step; of every four, the right pair first."""
    pairs = [list(enumerate(tokens))[i : i + 2] for i in range(0, len(tokens), 2)]
    return [step for i in range(0, len(pairs), 2) for step in reversed(pairs[i : i + 2])]


def publish_last(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """What a worker does: publish each delta once, in order."""
    return deltas[-1:]


def unchanged(commit: Commit) -> Commit:
    """The plain step."""
    return commit


def admit_all(_: Submit) -> None:
    """What a scheduler with room does."""


@dataclass
class FakeFleet:
    """Scheduler and worker in one: admits requests and commits a scripted text to the store."""

    bus: Bus
    store: Store
    model: ServedModel
    answer: Callable[[NewRequest], str] = lambda _: "hello world"
    mangle: Callable[[list[TokenDelta]], list[TokenDelta]] = publish_last
    """Given all deltas of a request so far after each commit, says which to publish now."""
    vary: Callable[[Commit], Commit] = unchanged
    """Changes a step before it is committed."""
    refuse: Callable[[Submit], Refused | None] = admit_all
    step_s: float = 0.0
    n_steps: int | None = None
    """Hang after so many steps."""
    submits: list[Submit] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of the submits."""
    cancels: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    """Answer to the last commit of each request."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Answer submits and cancels."""
        card = ServiceCard("scheduler", "0", "fake", {"id": "fake", "pid": "0", "address": ""})
        submit = Endpoint("submit", subjects.REQUEST_SUBMIT, self._submit)
        cancel = Endpoint("cancel", subjects.REQUEST_CANCEL, self._cancel)
        await self.bus.serve(card, [submit, cancel])

    async def close(self) -> None:
        """Stop all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _submit(self, message: BusMessage) -> bytes:
        submit = decode_request(message.data)
        assert isinstance(submit, Submit)
        self.submits.append(submit)
        self.headers.append(dict(message.headers))
        refused = self.refuse(submit)
        if refused is not None:
            return encode(refused)
        answer = await self.store.admit(submit.request_id, term=1, owner=WORKER)
        if answer.outcome == "admitted":
            self._tasks.append(asyncio.create_task(self._run(submit.request_id)))
        return encode(Admitted(request_id=submit.request_id, predicted_finish_s=1.0, threshold=0.9))

    async def _cancel(self, message: BusMessage) -> bytes:
        cancel = decode_request(message.data)
        assert isinstance(cancel, Cancel)
        self.cancels.append(cancel.request_id)
        return encode(Cancelled(request_id=cancel.request_id, known=True))

    def _tokens(self, request: NewRequest) -> list[int]:
        """The answer and EOS; with `ignore_eos` the answer again and again."""
        tokens = self.model.tokenizer.encode(self.answer(request), add_special_tokens=False)
        n_output = request.spec.n_output
        if request.spec.ignore_eos:
            return (tokens * n_output)[:n_output]
        return [*tokens, min(self.model.eos_ids)][:n_output]

    async def _run(self, request_id: str) -> None:
        record = (await self.store.load([request_id]))[0]
        assert record is not None
        tokens = self._tokens(record.request)
        steps = shuffle_steps(tokens)
        end: FinishReason = "stop" if tokens[-1] in self.model.eos_ids else "length"
        deltas: list[TokenDelta] = []
        for number, pairs in enumerate(steps[: self.n_steps], start=1):
            await asyncio.sleep(self.step_s)
            finish = end if number == len(steps) else None
            commit = self.vary(_commit(request_id, number, pairs, finish))
            outcome = (await self.store.commit([commit]))[0]
            self.outcomes[request_id] = outcome
            if outcome == "terminal":
                return
            deltas.append(_delta(commit))
            for delta in self.mangle(deltas):
                await self.bus.publish(subjects.tokens(record.request.gateway_id), encode(delta))


@asynccontextmanager
async def serve_app(app: ASGIApp) -> AsyncIterator[str]:
    """The application on a free port of loopback; gives its URL."""
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, stop_timeout_s=1)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield url_of(listener)
    finally:
        server.stop()
        await serving
        listener.close()


def _commit(request_id: str, step: int, pairs: Step, finish: FinishReason | None) -> Commit:
    return Commit(
        request_id=request_id,
        epoch=1,
        step=step,
        block=0,
        kind="recompute",
        threshold=0.9,
        worker=WORKER,
        latency_ms=1.5,
        positions=[position for position, _ in pairs],
        tokens=[token for _, token in pairs],
        confidences=[CONFIDENCE] * len(pairs),
        stats=_STATS,
        finish_reason=finish,
    )


def _delta(commit: Commit) -> TokenDelta:
    return TokenDelta(
        request_id=commit.request_id,
        epoch=commit.epoch,
        step=commit.step,
        positions=commit.positions,
        tokens=commit.tokens,
        confidences=commit.confidences,
        kind=commit.kind,
        threshold=commit.threshold,
        worker=commit.worker,
        rebuilt=commit.rebuilt,
        finish_reason=commit.finish_reason,
    )
