"""The store in Redis (7 or later) or Valkey: one server-side function per change of a request
(functions.lua), one pipelined round trip per batch of commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from redis import exceptions

from dilaserve.store import keys
from dilaserve.store.encoding import (
    DamagedError,
    commit_arguments,
    request_fields,
    to_delta,
    to_record,
)
from dilaserve.store.records import (
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
from dilaserve.store.server import RedisServer, function_call, open_server
from dilaserve.store.steps import check_commit, outside

_RECORDS_A_ROUND_TRIP = 256

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def connect_redis(
    url: str,
    *,
    retention_s: float = 900.0,
    start_timeout_s: float = 30.0,
    timeout_s: float = 5.0,
) -> RedisStore:
    """Connect to a server, waiting up to `start_timeout_s` for it to come up. Ended requests are
    kept for `retention_s`; a call that is not answered within `timeout_s` raises.
    Raises StoreUnavailableError, SettingsError."""
    server = await open_server(url, start_timeout_s=start_timeout_s, timeout_s=timeout_s)
    return RedisStore(server, retention_s=retention_s)


class RedisStore:
    """See Store; made by `connect_redis`."""

    def __init__(self, server: RedisServer, *, retention_s: float) -> None:
        self._server = server
        self._retention_ms = _milliseconds(retention_s)

    # --- gateway -------------------------------------------------------------------------------

    async def new(self, request: NewRequest, *, expire_s: float = 30.0) -> bool:
        """See Store.new. Not repeated after a lost connection: the repeat would find itself."""
        call = function_call(
            "dls_new",
            [keys.record(request.request_id)],
            [_milliseconds(expire_s), request.spec.n_output, *request_fields(request)],
        )
        return bool(await self._server.command(call, retry=False))

    async def cancel(self, request_id: str, *, reason: str) -> CancelAnswer:
        """See Store.cancel."""
        answer = await self._server.command(
            function_call(
                "dls_cancel", _end_keys(request_id), [request_id, self._retention_ms, reason]
            )
        )
        return CancelAnswer(outcome=answer.decode())

    # --- scheduler -----------------------------------------------------------------------------

    async def admit(
        self, request_id: str, *, term: int, owner: str, min_epoch: int = 1
    ) -> AdmitAnswer:
        """See Store.admit."""
        shard = keys.shard_of(request_id)
        outcome, epoch, step, stored_owner, _ = await self._server.command(
            function_call(
                "dls_admit",
                [keys.record(request_id), keys.active(shard), keys.term(shard)],
                [request_id, term, owner, max(1, min_epoch)],
            )
        )
        return AdmitAnswer(
            outcome=outcome.decode(), epoch=epoch, step=step, owner=stored_owner.decode()
        )

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
        outcome, epoch, step, stored_owner, attempts = await self._server.command(
            function_call(
                "dls_reassign",
                [keys.record(request_id), keys.term(keys.shard_of(request_id))],
                [term, owner, expected_epoch, min_epoch, int(owner_died)],
            )
        )
        return ReassignAnswer(
            outcome=outcome.decode(),
            epoch=epoch,
            step=step,
            owner=stored_owner.decode(),
            attempts=attempts,
        )

    async def fail(self, request_id: str, *, term: int, error: str) -> FailAnswer:
        """See Store.fail."""
        answer = await self._server.command(
            function_call(
                "dls_fail",
                [*_end_keys(request_id), keys.term(keys.shard_of(request_id))],
                [request_id, self._retention_ms, term, error],
            )
        )
        return FailAnswer(outcome=answer.decode())

    async def take_lease(self, holder: str, *, ttl_s: float, min_term: int = 0) -> int | None:
        """See Store.take_lease. The shards' terms are raised before it returns, so that a
        predecessor that still thinks it is the scheduler is refused everywhere."""
        shards = range(keys.N_SHARDS)
        shard_terms = await self._server.commands([["GET", keys.term(shard)] for shard in shards])
        min_term = max(min_term, *(_number(term) + 1 for term in shard_terms))
        term: int | None = await self._server.command(
            function_call(
                "dls_take_lease",
                [keys.LEASE, keys.LEASE_TERM],
                [holder, _milliseconds(ttl_s), min_term],
            )
        )
        if term is not None:
            await self._server.commands(
                [function_call("dls_raise_term", [keys.term(shard)], [term]) for shard in shards]
            )
        return term

    async def renew_lease(self, holder: str, *, term: int, ttl_s: float) -> bool:
        """See Store.renew_lease."""
        call = function_call(
            "dls_renew_lease", [keys.LEASE], [f"{term} {holder}", _milliseconds(ttl_s)]
        )
        return bool(await self._server.command(call))

    async def release_lease(self, holder: str, *, term: int) -> None:
        """See Store.release_lease."""
        await self._server.command(
            function_call("dls_release_lease", [keys.LEASE], [f"{term} {holder}"])
        )

    async def active(self) -> list[str]:
        """See Store.active; sorted."""
        shards = await self._server.commands(
            [["SMEMBERS", keys.active(shard)] for shard in range(keys.N_SHARDS)]
        )
        return sorted(member.decode() for members in shards for member in members)

    # --- worker --------------------------------------------------------------------------------

    async def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """See Store.commit."""
        for commit in commits:
            check_commit(commit)
        answers = await self._server.commands(
            [
                function_call(
                    "dls_commit",
                    _end_keys(commit.request_id),
                    [commit.request_id, self._retention_ms, *commit_arguments(commit)],
                )
                for commit in commits
            ]
        )
        for commit, answer in zip(commits, answers, strict=True):
            if answer == b"outside":
                raise outside(commit)
        return [answer.decode() for answer in answers]

    # --- readers -------------------------------------------------------------------------------

    async def load(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """See Store.load."""
        records: list[RequestRecord | None] = []
        for start in range(0, len(request_ids), _RECORDS_A_ROUND_TRIP):
            chunk = request_ids[start : start + _RECORDS_A_ROUND_TRIP]
            hashes = await self._server.answers([["HGETALL", keys.record(id_)] for id_ in chunk])
            records += [
                _readable(keys.record(id_), to_record, fields) if fields else None
                for id_, fields in zip(chunk, hashes, strict=True)
            ]
        return records

    async def deltas(self, request_id: str, *, after_step: int = 0) -> list[Delta]:
        """See Store.deltas."""
        key = keys.stream(request_id)
        [entries] = await self._server.answers([["XRANGE", key, f"({after_step}-1", "+"]])
        if isinstance(entries, exceptions.ResponseError):
            entries = [(b"", entries)]
        deltas = [_readable(key, to_delta, fields) for _, fields in entries]
        return [delta for delta in deltas if delta is not None]

    async def run_id(self) -> str:
        """See Store.run_id."""
        info = await self._server.command(["INFO", "server"])
        return str(info["run_id"])

    async def memory(self) -> StoreMemory:
        """See Store.memory."""
        info = await self._server.command(["INFO", "memory"])
        return StoreMemory(used=info["used_memory"], limit=info["maxmemory"])

    async def close(self) -> None:
        """See Store.close."""
        await self._server.close()


@lru_cache(maxsize=1024)
def _end_keys(request_id: str) -> tuple[str, str, str]:
    active = keys.active(keys.shard_of(request_id))
    return (keys.record(request_id), keys.stream(request_id), active)


def _readable(key: str, decode: Callable[[Mapping[bytes, bytes]], T], fields: Any) -> T | None:
    """What `fields` hold; None where that is damaged, since one bad key must not stop the rest."""
    try:
        if isinstance(fields, exceptions.ResponseError):
            raise DamagedError(str(fields))
        return decode(fields)
    except DamagedError as error:
        logger.error("%s is damaged and counts as missing: %s", key, error)
        return None


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
