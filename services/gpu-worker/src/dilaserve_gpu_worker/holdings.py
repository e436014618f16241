"""What an instance holds, and what it was told to hold but has not loaded yet.

Keeps the engine in agreement with commands and records. Knows no bus, no store and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from dilaserve.errors import InvalidRequestError
from dilaserve.lifecycle import is_terminal
from dilaserve.messages import CommitOutcome, Held, Rejected, Release, StepCommand, StepItem
from dilaserve.store.records import LOST_CONFIDENCE, MASKED, RequestRecord
from dilaserve_gpu_worker.engine.types import (
    Credit,
    EngineRequest,
    NeverFitsError,
    StepOutput,
)
from dilaserve_gpu_worker.observe import RequestTrace, RequestTraces

__all__ = ["Holding", "Holdings", "RequestEngine", "Unanswered"]

N_REMEMBERED = 256
"""Fenced requests whose canvas is remembered, in case the store turns out to have lost steps; and
released ones, of which a pass that is under way may still bring a step."""

Ending = CommitOutcome | Literal["finished", "released", "superseded", "rejected"]


class RequestEngine(Protocol):
    """The part of the engine that is for single requests."""

    def add(self, request: EngineRequest) -> None:
        """Hold a request. Raises NeverFitsError, InvalidRequestError."""
        ...

    def set_credit(self, request_id: str, credit: Credit) -> None:
        """Replace the credit of a held request."""
        ...

    def limit_recomputes(self, n_tokens: int | None) -> None:
        """Most tokens of the rows of a pass that compute their whole length; None: no limit."""
        ...

    def remove(self, request_id: str) -> None:
        """Forget a request and free its KV."""
        ...


@dataclass(slots=True)
class Holding:
    """A request that the engine holds. `step`, `canvas` and `confidences` (with which its tokens
    were committed, 0 elsewhere) are the committed ones: the engine's may be a step ahead."""

    request_id: str
    epoch: int
    gateway_id: str
    step: int
    canvas: list[int]
    confidences: list[float]
    trace: RequestTrace

    def canvas_after(self, output: StepOutput) -> list[int]:
        """The committed canvas with the tokens of `output`, which need not be committed yet."""
        canvas = list(self.canvas)
        for position, token in zip(output.positions, output.tokens, strict=True):
            canvas[position] = token
        return canvas


Unanswered = tuple[Holding, StepOutput]
"""A step that was computed, of a request that was held when its pass ended."""


class Holdings:
    """All requests of one instance. `committed` and `forget` leave the engine alone."""

    def __init__(
        self, engine: RequestEngine, *, instance_id: str, model_id: str, traces: RequestTraces
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._model_id = model_id
        self._traces = traces
        self._held: dict[str, Holding] = {}
        self._to_remove: list[str] = []
        self._fenced: OrderedDict[str, Holding] = OrderedDict()
        self._released: OrderedDict[str, Holding] = OrderedDict()
        self.wanted: dict[str, StepItem] = {}
        """Credited, but to be loaded, or read again because of a new epoch."""

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, command: StepCommand) -> None:
        """Upsert the items, drop the releases. Fencing by (term, seq) is the caller's."""
        for item in command.items:
            self._upsert(item)
        for release in command.releases:
            self._release(release)
        self._engine.limit_recomputes(command.recompute_tokens)

    def take(
        self, item: StepItem, record: RequestRecord | None, confidences: Mapping[int, float]
    ) -> Rejected | None:
        """Decide about a wanted item by the record that the store has: hold it, go on with the
        canvas that is held already, or refuse. `confidences`: with which its stored tokens were
        committed, by position, as far as they are known."""
        self.wanted.pop(item.request_id, None)
        if record is None:
            return self._refuse(item, "unknown", "no such record")
        request = record.request
        if is_terminal(record.state):
            return self._refuse(item, "terminal", f"the record is {record.state}")
        if request.model_id != self._model_id:
            detail = f"asks for model {request.model_id!r}, this instance has {self._model_id!r}"
            return self._refuse(item, "invalid", detail)
        if record.epoch > item.epoch:
            return self._refuse(item, "fenced", f"the stored epoch is {record.epoch}")
        if record.epoch < item.epoch:
            # The store lost the epoch's change: its answer is right by the epoch it still has.
            return _rejected(item, "unknown", f"the stored epoch is only {record.epoch}")
        if record.owner != self._instance_id:
            return self._refuse(item, "fenced", f"the stored owner is {record.owner!r}")
        return self._hold(item, record, confidences)

    def unanswered(self, outputs: Iterable[StepOutput]) -> list[Unanswered]:
        """The outputs of all requests that are held, or were released while they were computed;
        those of the others are dropped."""
        known = [(self._known(output.request_id), output) for output in outputs]
        return [(holding, output) for holding, output in known if holding is not None]

    def committed(self, holding: Holding, output: StepOutput) -> None:
        """The store has this step."""
        holding.step = output.step
        canvas, confidences = holding.canvas, holding.confidences
        for position, token, confidence in zip(
            output.positions, output.tokens, output.confidences, strict=True
        ):
            canvas[position], confidences[position] = token, confidence

    def forget(self, holding: Holding, why: Ending) -> None:
        """Hold it no longer; the engine learns of it with the next `sweep`."""
        if self._held.get(holding.request_id) is not holding:
            return
        del self._held[holding.request_id]
        self._to_remove.append(holding.request_id)
        holding.trace.end(why, holding.step)
        if why == "fenced":
            _remember(self._fenced, holding)
        elif why == "released":
            _remember(self._released, holding)

    def sweep(self) -> None:
        """Let the engine drop what was forgotten since the last pass."""
        for request_id in self._to_remove:
            self._engine.remove(request_id)
        self._to_remove.clear()

    def report(self) -> list[Held]:
        """What a heartbeat lists."""
        return [
            Held(request_id=h.request_id, epoch=h.epoch, step=h.step) for h in self._held.values()
        ]

    def close(self) -> None:
        """End every trace; the process is about to end."""
        for holding in list(self._held.values()):
            self.forget(holding, "released")

    def _upsert(self, item: StepItem) -> None:
        held = self._held.get(item.request_id)
        wanted = self.wanted.get(item.request_id)
        epoch = max(held.epoch if held else 0, wanted.epoch if wanted else 0)
        if item.epoch < epoch:
            return
        if held is not None and item.epoch == held.epoch:
            self._engine.set_credit(item.request_id, _credit(item))
        elif wanted is not None and item.epoch == wanted.epoch:
            trace = item.traceparent or wanted.traceparent
            self.wanted[item.request_id] = msgspec.structs.replace(item, traceparent=trace)
        else:
            self.wanted[item.request_id] = item

    def _release(self, release: Release) -> None:
        wanted = self.wanted.get(release.request_id)
        if wanted is not None and wanted.epoch <= release.epoch:
            del self.wanted[release.request_id]
        held = self._held.get(release.request_id)
        if held is not None and held.epoch <= release.epoch:
            self.forget(held, "released")

    def _refuse(
        self,
        item: StepItem,
        reason: Literal["unknown", "terminal", "fenced", "invalid"],
        detail: str,
    ) -> Rejected:
        held = self._held.get(item.request_id)
        if held is not None:
            self.forget(held, "rejected")
        return _rejected(item, reason, detail)

    def _hold(
        self, item: StepItem, record: RequestRecord, known: Mapping[int, float]
    ) -> Rejected | None:
        held = self._held.get(item.request_id)
        if held is not None and _continues(held, record):
            self._adopt(held, item)
            return None
        if held is not None:
            self.forget(held, "superseded")
        self.sweep()
        fenced = self._fenced.pop(item.request_id, None)
        if fenced is not None and _continues(fenced, record):
            # The store may have lost its last second; what we committed, a client may have seen.
            return self._add(item, record, fenced.step, fenced.canvas, fenced.confidences)
        confidences = _confidences(known, len(record.canvas))
        return self._add(item, record, record.step, record.canvas, confidences)

    def _adopt(self, held: Holding, item: StepItem) -> None:
        held.trace.end("superseded", held.step)
        held.trace = self._traces.begin(item, held.step)
        held.epoch = item.epoch
        self._engine.set_credit(item.request_id, _credit(item))

    def _add(
        self,
        item: StepItem,
        record: RequestRecord,
        step: int,
        canvas: list[int],
        confidences: list[float],
    ) -> Rejected | None:
        request = EngineRequest(
            request_id=item.request_id,
            prompt=record.request.prompt,
            spec=record.request.spec,
            step=step,
            canvas=list(canvas),
            credit=_credit(item),
            confidences=list(confidences),
        )
        try:
            self._engine.add(request)
        except NeverFitsError as error:
            return _rejected(item, "never_fits", str(error))
        except InvalidRequestError as error:
            return _rejected(item, "invalid", str(error))
        self._held[item.request_id] = Holding(
            request_id=item.request_id,
            epoch=item.epoch,
            gateway_id=record.request.gateway_id,
            step=step,
            canvas=list(canvas),
            confidences=list(confidences),
            trace=self._traces.begin(item, step),
        )
        return None

    def _known(self, request_id: str) -> Holding | None:
        return self._held.get(request_id) or self._released.get(request_id)


def _remember(remembered: OrderedDict[str, Holding], holding: Holding) -> None:
    remembered[holding.request_id] = holding
    if len(remembered) > N_REMEMBERED:
        remembered.popitem(last=False)


def _continues(ours: Holding, record: RequestRecord) -> bool:
    """Whether our canvas is at or past the stored one on the same course."""
    return ours.step >= record.step and all(
        stored in (MASKED, token) for stored, token in zip(record.canvas, ours.canvas, strict=True)
    )


def _confidences(known: Mapping[int, float], n_output: int) -> list[float]:
    confidences = [LOST_CONFIDENCE] * n_output
    for position, confidence in known.items():
        if position < n_output:
            confidences[position] = confidence
    return confidences


def _credit(item: StepItem) -> Credit:
    return Credit(item.threshold, item.until_block, item.until_step)


def _rejected(
    item: StepItem,
    reason: Literal["unknown", "terminal", "fenced", "never_fits", "invalid"],
    detail: str,
) -> Rejected:
    return Rejected(request_id=item.request_id, epoch=item.epoch, reason=reason, detail=detail)
