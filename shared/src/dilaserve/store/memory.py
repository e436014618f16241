"""The store in memory, following the lifecycle table: for tests and simulations in one process.

Tests make it fail: `down` refuses every call, `lose_answers` carries calls out and loses the
answer, `restore` brings back an older `snapshot` under a new run id.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dilaserve.errors import StoreUnavailableError
from dilaserve.lifecycle import Event, State, advance, is_terminal
from dilaserve.messages import ConfidenceStats, FinishReason
from dilaserve.store.answers import admit_answer, reassign_answer, to_record
from dilaserve.store.keys import N_SHARDS, shard_of
from dilaserve.store.records import (
    MASKED,
    AdmitAnswer,
    CancelAnswer,
    Commit,
    CommitOutcome,
    Delta,
    FailAnswer,
    NewRequest,
    ReassignAnswer,
    RequestRecord,
    StoreMemory,
)
from dilaserve.store.steps import check_commit, to_delta, unmask

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Record:
    request: NewRequest
    canvas: list[int]
    expires_s: float | None
    state: State = "new"
    epoch: int = 0
    term: int = 0
    owner: str = ""
    attempts: int = 0
    step: int = 0
    stats: ConfidenceStats | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    ended_s: float | None = None
    weights_hash: str = ""
    deltas: list[Delta] = field(default_factory=list)


@dataclass(slots=True)
class _Lease:
    holder: str
    term: int
    expires_s: float


@dataclass(slots=True)
class _Data:
    records: dict[str, _Record] = field(default_factory=dict)
    lease: _Lease | None = None
    terms: list[int] = field(default_factory=lambda: [0] * N_SHARDS)
    """Highest term seen, by shard: as in Redis, a write tells its own shard only."""


def _call(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let a method fail as a server would: before (down) or after (answer lost) it is done."""

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        store: Any = args[0]
        if store.down:
            raise StoreUnavailableError("the store is down; nothing was written")
        answer = await method(*args, **kwargs)
        if store.lose_answers > 0:
            store.lose_answers -= 1
            raise StoreUnavailableError("the answer was lost; the write has happened")
        return answer

    return call


class MemoryStore:
    """See Store. `clock`: seconds, for expiry and the lease; `wall`: seconds since the epoch."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        retention_s: float = 900.0,
    ) -> None:
        self.down = False
        self.lose_answers = 0
        self.memory_limit = 0
        self._clock = clock
        self._wall = wall
        self._retention_s = retention_s
        self._data = _Data()
        self._runs = itertools.count(1)
        self._run = next(self._runs)

    # --- tests ---------------------------------------------------------------------------------

    def snapshot(self) -> _Data:
        """Everything stored now, to be given to `restore`."""
        return copy.deepcopy(self._data)

    def restore(self, data: _Data) -> None:
        """Restart with older data, as after a crash that lost the last writes."""
        self._data = copy.deepcopy(data)
        self._run = next(self._runs)

    # --- gateway -------------------------------------------------------------------------------

    @_call
    async def new(self, request: NewRequest, *, expire_s: float = 30.0) -> bool:
        """See Store.new."""
        if self._find(request.request_id):
            return False
        self._data.records[request.request_id] = _Record(
            request=request,
            canvas=[MASKED] * request.spec.n_output,
            expires_s=self._clock() + expire_s,
        )
        return True

    @_call
    async def cancel(self, request_id: str, *, reason: str) -> CancelAnswer:
        """See Store.cancel."""
        record = self._find(request_id)
        if record is None:
            return CancelAnswer(outcome="missing")
        if is_terminal(record.state):
            return CancelAnswer(outcome="terminal")
        self._end(record, "cancel", error=reason)
        return CancelAnswer(outcome="cancelled")

    # --- scheduler -----------------------------------------------------------------------------

    @_call
    async def admit(
        self, request_id: str, *, term: int, owner: str, min_epoch: int = 1
    ) -> AdmitAnswer:
        """See Store.admit."""
        fresh, record = self._raise_term(request_id, term), self._find(request_id)
        if not fresh:
            return admit_answer("stale_term", record)
        if record is None:
            return admit_answer("missing", record)
        if record.state != "new":
            return admit_answer("terminal" if is_terminal(record.state) else "already", record)
        record.state = advance(record.state, "admit")
        record.epoch, record.term, record.owner = max(1, min_epoch), term, owner
        record.expires_s = None
        return admit_answer("admitted", record)

    @_call
    async def reassign(
        self,
        request_id: str,
        *,
        term: int,
        owner: str,
        expected_epoch: int,
        min_epoch: int = 0,
        owner_died: bool = False,
    ) -> ReassignAnswer:
        """See Store.reassign."""
        fresh, record = self._raise_term(request_id, term), self._find(request_id)
        if not fresh:
            return reassign_answer("stale_term", record)
        if record is None:
            return reassign_answer("missing", record)
        if is_terminal(record.state):
            return reassign_answer("terminal", record)
        if record.state == "new" or record.epoch != expected_epoch:
            return reassign_answer("conflict", record)
        record.state = advance(record.state, "reassign")
        record.epoch = max(record.epoch, min_epoch - 1) + 1
        record.term, record.owner = term, owner
        record.attempts += owner_died
        return reassign_answer("reassigned", record)

    @_call
    async def fail(self, request_id: str, *, term: int, error: str) -> FailAnswer:
        """See Store.fail."""
        fresh, record = self._raise_term(request_id, term), self._find(request_id)
        if not fresh:
            return FailAnswer(outcome="stale_term")
        if record is None:
            return FailAnswer(outcome="missing")
        if is_terminal(record.state):
            return FailAnswer(outcome="terminal")
        self._end(record, "fail", error=error)
        record.term = term
        return FailAnswer(outcome="failed")

    @_call
    async def take_lease(self, holder: str, *, ttl_s: float, min_term: int = 0) -> int | None:
        """See Store.take_lease."""
        lease = self._lease()
        if lease and lease.holder != holder:
            return None
        term = max(max(self._data.terms) + 1, min_term)
        self._data.lease = _Lease(holder, term, self._clock() + ttl_s)
        self._data.terms = [term] * N_SHARDS
        return term

    @_call
    async def renew_lease(self, holder: str, *, term: int, ttl_s: float) -> bool:
        """See Store.renew_lease."""
        lease = self._lease()
        if lease is None or (lease.holder, lease.term) != (holder, term):
            return False
        lease.expires_s = self._clock() + ttl_s
        return True

    @_call
    async def release_lease(self, holder: str, *, term: int) -> None:
        """See Store.release_lease."""
        lease = self._lease()
        if lease and (lease.holder, lease.term) == (holder, term):
            self._data.lease = None

    @_call
    async def active(self) -> list[str]:
        """See Store.active; sorted."""
        return sorted(key for key, record in self._data.records.items() if record.state == "active")

    # --- worker --------------------------------------------------------------------------------

    @_call
    async def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """See Store.commit."""
        for commit in commits:
            check_commit(commit)
        answers = [self._commit(commit) for commit in commits]
        outcomes = [answer for answer in answers if not isinstance(answer, ValueError)]
        if len(outcomes) < len(answers):
            raise next(answer for answer in answers if isinstance(answer, ValueError))
        return outcomes

    # --- readers -------------------------------------------------------------------------------

    @_call
    async def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """See Store.load."""
        records = [self._find(request_id) for request_id in request_ids]
        return [to_record(record) if record else None for record in records]

    @_call
    async def deltas(self, request_id: str, *, after_step: int = 0) -> list[Delta]:
        """See Store.deltas."""
        record = self._find(request_id)
        return [delta for delta in record.deltas if delta.step > after_step] if record else []

    @_call
    async def run_id(self) -> str:
        """See Store.run_id."""
        return f"memory-{self._run}"

    @_call
    async def memory(self) -> StoreMemory:
        """See Store.memory; only token ids are counted, `memory_limit` is the tests' to set."""
        n_tokens = sum(len(r.request.prompt) + len(r.canvas) for r in self._data.records.values())
        return StoreMemory(used=4 * n_tokens, limit=self.memory_limit)

    async def close(self) -> None:
        """See Store.close."""

    def _find(self, request_id: str) -> _Record | None:
        record = self._data.records.get(request_id)
        if record and record.expires_s is not None and record.expires_s <= self._clock():
            del self._data.records[request_id]
            return None
        return record

    def _lease(self) -> _Lease | None:
        lease = self._data.lease
        return lease if lease and lease.expires_s > self._clock() else None

    def _raise_term(self, request_id: str, term: int) -> bool:
        shard = shard_of(request_id)
        if term < self._data.terms[shard]:
            return False
        self._data.terms[shard] = term
        return True

    def _end(self, record: _Record, event: Event, *, error: str = "") -> None:
        record.state = advance(record.state, event)
        record.error = error
        record.ended_s = self._wall()
        record.expires_s = self._clock() + self._retention_s

    def _commit(self, commit: Commit) -> CommitOutcome | ValueError:
        record = self._find(commit.request_id)
        if record is None or record.state in ("cancelled", "failed"):
            return "terminal"
        if record.epoch != commit.epoch:
            return "fenced"
        if commit.step <= record.step:
            return "duplicate"
        if record.state == "done":
            return "terminal"
        if record.weights_hash not in ("", commit.weights_hash):
            return "fenced"
        if commit.step > record.step + 1 and commit.canvas is None:
            return "gap"
        return self._write(record, commit)

    def _write(self, record: _Record, commit: Commit) -> CommitOutcome | ValueError:
        try:
            added = unmask(record.canvas, commit)
        except ValueError as error:
            return error
        if added is None:
            return "fenced"
        for position, token in zip(added.positions, added.tokens, strict=True):
            record.canvas[position] = token
        record.deltas.append(to_delta(commit, added))
        record.state = advance(record.state, "commit")
        record.step, record.stats = commit.step, commit.stats
        record.weights_hash = commit.weights_hash
        if commit.finish_reason:
            record.finish_reason = commit.finish_reason
            self._end(record, "finish")
        return "committed"
