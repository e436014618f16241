"""The course of a stored request as JSON: its record, and every step. Reads, changes nothing."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from dilaserve.store import Store
from dilaserve.store.records import MASKED, Delta, RequestRecord
from dilaserve_gateway.cancelling import STOPPED
from dilaserve_gateway.course import EXTENSION, course_of, course_report
from dilaserve_gateway.errors import request_not_found
from dilaserve_gateway.model import ServedModel

LONG_CANVAS = 512


async def read_history(store: Store, model: ServedModel, request_id: str) -> dict[str, Any]:
    """Record and steps. Raises ApiError 404, and UnavailableError."""
    record = (await store.load([request_id]))[0]
    if record is None:
        raise request_not_found(request_id)
    deltas = await store.deltas(request_id)
    if len(record.canvas) > LONG_CANVAS:
        return await asyncio.to_thread(_history, record, deltas, model)
    return _history(record, deltas, model)


def _history(record: RequestRecord, deltas: list[Delta], model: ServedModel) -> dict[str, Any]:
    request = record.request
    return {
        "id": request.request_id,
        "object": "request",
        "model": request.model_id,
        "state": "done" if _was_stopped(record) else record.state,
        "finish_reason": "stop" if _was_stopped(record) else record.finish_reason,
        "error": None if _was_stopped(record) else record.error or None,
        "arrival_s": request.arrival_s,
        "ended_s": record.ended_s,
        "gateway": request.gateway_id,
        "owner": record.owner or None,
        "epoch": record.epoch,
        "term": record.term,
        "attempts": record.attempts,
        "step": record.step,
        "spec": msgspec.to_builtins(request.spec),
        "level": msgspec.to_builtins(request.level),
        EXTENSION: _report(record, deltas),
        "traceparent": request.traceparent or None,
        "prompt": request.prompt,
        "canvas": [None if token == MASKED else token for token in record.canvas],
        "text": model.tokenizer.decode(_answer(record, model.eos_ids)),
        "steps": [_step(delta, model) for delta in deltas],
    }


def _report(record: RequestRecord, deltas: list[Delta]) -> dict[str, Any]:
    """The same figures as in the answer, but for the latency: up to the commit of the last token,
    by the store's clock, without its way to the gateway."""
    report = course_report(record.request.level, [course_of(deltas)], latency_s=_latency_s(record))
    if record.state != "done" and not _was_stopped(record):
        report["slo_met"] = False if record.state == "failed" else None
    return report


def _was_stopped(record: RequestRecord) -> bool:
    """Whether a stop string ended it. The gateway finds those, and cancels what is left to do; for
    whoever asked, the request is answered."""
    return record.state == "cancelled" and record.error == STOPPED


def _latency_s(record: RequestRecord) -> float | None:
    """From arrival to its end; the clocks of two hosts may differ by more than it took."""
    return None if record.ended_s is None else max(0.0, record.ended_s - record.request.arrival_s)


def _answer(record: RequestRecord, eos_ids: frozenset[int]) -> list[int]:
    """Tokens before the first masked position, and before EOS unless that is ignored."""
    ends = {MASKED} if record.request.spec.ignore_eos else {MASKED, *eos_ids}
    return list(itertools.takewhile(lambda token: token not in ends, record.canvas))


def _step(delta: Delta, model: ServedModel) -> dict[str, Any]:
    texts = [model.tokenizer.token_text(token) for token in delta.tokens]
    return {**msgspec.to_builtins(delta), "texts": texts}
