"""Collects what one event leads to, and hands it over at once: one command per instance at most.

Numbers commands and store calls. Knows no policy and decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dilaserve.messages import Admitted, Cancelled, Refused, Release, StepCommand
from dilaserve.plan_messages import Drained, NotDrained
from dilaserve_scheduler.core import credit
from dilaserve_scheduler.core.effects import (
    Admit,
    AnswerDrain,
    Ask,
    Effect,
    Ended,
    Fail,
    FailCause,
    ListActive,
    Load,
    Log,
    MoveCause,
    RaiseTerm,
    Reassign,
    Reply,
    Send,
)
from dilaserve_scheduler.core.model import Instance, Request

__all__ = ["Outbox"]


@dataclass(slots=True)
class _Draft:
    instance: Instance
    items: dict[str, Request] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)


class Outbox:
    """Effects in the order in which they came up; commands after them."""

    def __init__(self, term: int) -> None:
        self.term = term
        self._ops = itertools.count(1)
        self._effects: list[Effect] = []
        self._drafts: dict[str, _Draft] = {}

    # --- to workers ----------------------------------------------------------------------------

    def credit(self, request: Request) -> None:
        """Send its owner the request's credit, as it stands when the event is done with."""
        if request.instance is not None and request.instance.state == "live":
            self._draft(request.instance).items[request.request_id] = request

    def release(self, instance: Instance, request_id: str, epoch: int) -> None:
        """Let the instance forget the request at this epoch and below."""
        if instance.state == "live":
            releases = self._draft(instance).releases
            releases[request_id] = max(epoch, releases.get(request_id, 0))

    # --- to the store --------------------------------------------------------------------------

    def admit(self, request: Request, owner: str) -> None:
        """Admit it, above every epoch that it had; the answer is awaited."""
        call = Admit(next(self._ops), request.request_id, owner, request.epoch + 1)
        self._call(request, call)

    def reassign(
        self,
        request: Request,
        owner: str,
        *,
        expected_epoch: int,
        cause: MoveCause,
        min_epoch: int = 0,
        owner_died: bool = False,
    ) -> None:
        """Give it another owner, or none; the answer is awaited."""
        call = Reassign(
            next(self._ops),
            request.request_id,
            owner,
            expected_epoch,
            cause,
            min_epoch,
            owner_died,
        )
        self._call(request, call)

    def fail(self, request: Request, error: str, cause: FailCause) -> None:
        """End it with a message for the client; the answer is awaited."""
        self._call(request, Fail(next(self._ops), request.request_id, error, cause))

    def load(self, requests: Iterable[Request], unknown: Iterable[str] = ()) -> None:
        """Read records again, those of requests that memory does not hold too."""
        known = list(requests)
        request_ids = (*(request.request_id for request in known), *unknown)
        if not request_ids:
            return
        op = next(self._ops)
        for request in known:
            request.load_op = op
        self._effects.append(Load(op, request_ids))

    def list_active(self) -> None:
        """Ask which records are active."""
        self._effects.append(ListActive())

    # --- to others -----------------------------------------------------------------------------

    def reply(self, request_id: str, answer: Admitted | Refused | Cancelled) -> None:
        """Answer whoever waits."""
        self._effects.append(Reply(request_id, answer))

    def answer_drain(self, answer: Drained | NotDrained) -> None:
        """Answer the planner."""
        self._effects.append(AnswerDrain(answer))

    def ended(self, request_id: str) -> None:
        """Say that the request is forgotten."""
        self._effects.append(Ended(request_id))

    def ask(self, query: object) -> None:
        """Pass on a question of the policy's."""
        self._effects.append(Ask(query))

    def raise_term(self, above: int) -> None:
        """Ask for a term above one that was seen."""
        self._effects.append(RaiseTerm(above))

    def log(self, level: Literal["info", "warning"], text: str) -> None:
        """Tell the operator."""
        self._effects.append(Log(level, text))

    def take(self, now: float) -> list[Effect]:
        """Everything collected since the last time."""
        effects, self._effects = self._effects, []
        drafts, self._drafts = self._drafts, {}
        for draft in drafts.values():
            if draft.instance.state == "live":
                effects.extend(self._command(now, draft))
        return effects

    def _draft(self, instance: Instance) -> _Draft:
        draft = self._drafts.get(instance.instance_id)
        if draft is None:
            draft = self._drafts[instance.instance_id] = _Draft(instance)
        return draft

    def _call(self, request: Request, call: Admit | Reassign | Fail) -> None:
        request.call = call
        request.load_op = 0
        self._effects.append(call)

    def _command(self, now: float, draft: _Draft) -> list[Effect]:
        instance = draft.instance
        requests = [r for r in draft.items.values() if r.placed and r.instance is instance]
        if not requests and not draft.releases:
            return []
        instance.seq += 1
        for request in requests:
            request.sent, request.sent_at, request.sent_seq = True, now, instance.seq
        command = StepCommand(
            term=self.term,
            seq=instance.seq,
            items=[credit.item(request) for request in requests],
            releases=[
                Release(request_id=request_id, epoch=epoch)
                for request_id, epoch in draft.releases.items()
            ],
            recompute_tokens=instance.recompute_tokens,
        )
        first = tuple(r.request_id for r in requests if not r.confirmed)
        return [Send(instance.instance_id, command, first)]
