"""Memory against store: at the start, after a restart of the store, and every few seconds.

The store is right about what is committed and ended, memory about who is to own what: where they
disagree about owner or epoch, the request stays where it is at an epoch above both.
"""

from __future__ import annotations

from dilaserve.lifecycle import is_terminal
from dilaserve_scheduler.core.advancing import Advancing
from dilaserve_scheduler.core.events import (
    ActiveListed,
    Loaded,
    Recovered,
    StoredRequest,
    StoreRestarted,
    TermRaised,
)
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.progress import advance_by_record
from dilaserve_scheduler.core.settings import CoreSettings

__all__ = ["Recovery"]


class Recovery:
    """Reads records again and draws the conclusions."""

    def __init__(
        self,
        members: Members,
        placing: Placing,
        advancing: Advancing,
        outbox: Outbox,
        settings: CoreSettings,
    ) -> None:
        self._members = members
        self._placing = placing
        self._advancing = advancing
        self._outbox = outbox
        self._settings = settings
        self._reconcile_at: float | None = None
        self._ticked_at = 0.0
        self._unheard_s = 0.0

    def open(self, now: float) -> None:
        """Start."""
        self._reconcile_at = now + self._settings.reconcile_every_s

    def wake_at(self) -> float | None:
        """When the active set is to be read again; None while an answer is awaited."""
        return self._reconcile_at

    def tick(self, now: float) -> None:
        """Read the active set if it is time."""
        if self._reconcile_at is not None and now >= self._reconcile_at:
            self._reconcile_at = None
            self._outbox.list_active()
            self._members.forget_dead(now, self._settings.forget_dead_after_s)
            self._give_up_unheard(now)

    def on_recovered(self, now: float, event: Recovered) -> None:
        """All active records, at the start."""
        for record in event.records:
            if record.request_id not in self._placing.requests:
                self._adopt(now, record)
        if event.records:
            self._outbox.log("info", f"took over {len(event.records)} active requests")

    def on_listed(self, now: float, event: ActiveListed) -> None:
        """The store's active set: what only one side knows is read."""
        self._reconcile_at = now + self._settings.reconcile_every_s
        requests, listed = self._placing.requests, set(event.request_ids)
        unknown = listed - requests.keys()
        ended = [requests[request_id] for request_id in requests.keys() - listed]
        self._outbox.load((r for r in ended if _settled(r)), unknown)

    def on_loaded(self, now: float, event: Loaded) -> None:
        """Records read again. Of a request that has moved since, the answer is too old."""
        requests = self._placing.requests
        for record in event.records:
            request = requests.get(record.request_id)
            if request is None and record.state == "active":
                self._outbox.log("info", f"adopted {record.request_id}, which was not known")
                self._adopt(now, record)
            elif request is not None and request.load_op == event.op:
                self._compare(now, request, record)
        for request_id in event.absent:
            request = requests.get(request_id)
            if request is not None and request.load_op == event.op:
                self._placing.drop(now, request, finished=False)

    def on_restarted(self, now: float, event: StoreRestarted) -> None:
        """The store may have lost its last second: raise every epoch above all that were known.
        The owners stay, since they may hold steps that the store has lost."""
        self._outbox.log("warning", "the store was restarted; all epochs are raised")
        for request in list(self._placing.requests.values()):
            if _settled(request):
                self._placing.fence(now, request, stored_epoch=request.epoch, above=request.epoch)

    def on_term(self, now: float, event: TermRaised) -> None:
        """The lease is held under a higher term: repeat what was refused, and check the rest."""
        self._outbox.term = event.term
        self._placing.repeat_calls()
        self._outbox.load(r for r in self._placing.requests.values() if _settled(r))

    def _give_up_unheard(self, now: float) -> None:
        """Silence alone proves no death of the last instance, so its requests do not wait in line;
        but they do not wait for ever either. Only ticks count: while this process stood still, it
        heard nobody either."""
        was_heard = self._members.heard_at >= self._ticked_at
        self._unheard_s = 0.0 if was_heard else self._unheard_s + self._settings.reconcile_every_s
        self._ticked_at = now
        if self._unheard_s < self._settings.queue_timeout_s:
            return
        error = f"no instance at all was heard for {self._unheard_s:g} s; start one, send it again"
        for request in [r for r in self._placing.requests.values() if r.placed]:
            self._placing.fail(now, request, error, "timed_out")

    def _adopt(self, now: float, record: StoredRequest) -> None:
        request = _from_record(record)
        advance_by_record(now, request, record)
        self._placing.adopt(now, request, record.owner)

    def _compare(self, now: float, request: Request, record: StoredRequest) -> None:
        request.load_op = 0
        if is_terminal(record.state):
            self._placing.drop(now, request, finished=record.state == "done")
        elif record.state == "new":
            self._placing.readmit(now, request)
        elif _settled(request):
            self._agree(now, request, record)

    def _agree(self, now: float, request: Request, record: StoredRequest) -> None:
        progressed = advance_by_record(now, request, record)
        request.weights_hash = record.weights_hash
        owner = request.instance.instance_id if request.instance is not None else ""
        if (record.epoch, record.owner) != (request.epoch, owner):
            self._placing.fence(now, request, stored_epoch=record.epoch, above=record.epoch)
        elif request.has_strange_owner:
            self._placing.displace(now, request, "misplaced")
        elif progressed:
            self._advancing.go_on(now, request)
        else:
            request.n_unheeded += 1
        if request.placed and now - request.sent_at >= self._settings.reload_gap_s:
            self._outbox.credit(request)


def _settled(request: Request) -> bool:
    """Whether no store call is outstanding, so that what is stored can be compared."""
    return request.state in ("running", "parked")


def _from_record(record: StoredRequest) -> Request:
    return Request(
        request_id=record.request_id,
        model_id=record.model_id,
        n_prompt=record.n_prompt,
        n_output=record.n_output,
        block_length=record.block_length,
        arrival_s=record.arrival_s,
        slo_s=record.slo_ms / 1000 if record.slo_ms is not None else None,
        priority=record.priority,
        min_confidence=record.min_confidence,
        weights_hash=record.weights_hash,
        epoch=record.epoch,
        attempts=record.attempts,
    )
