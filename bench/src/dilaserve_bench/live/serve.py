"""How well a live gateway serves an open-loop load: one row for each rate, or for a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dilaserve_bench.live.load import Answer, Body, drive
from dilaserve_bench.twin.report import quantile
from dilaserve_bench.twin.workload import Arrival, Workload

__all__ = ["Percentiles", "ServeRow", "Served", "body_of", "row_of", "serve_one"]

PATH = "/v1/chat/completions"


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, of those that were served."""

    p50: float | None
    p90: float | None
    p99: float | None


class ServeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Latencies count from when a request was due."""

    load: str
    """`poisson`, or the name of the trace."""
    rate: float
    """Arrivals a second, over the load as it was drawn."""
    n: int
    n_done: int
    n_refused: int
    n_failed: int
    seconds: float
    """From the first arrival to the last answer."""
    requests_per_s: float
    """Served."""
    tokens_per_s: float
    """As the gateway counts them, without what comes after an EOS."""
    first_text_s: Percentiles
    latency_s: Percentiles
    attainment: float
    """Share of all requests that were served within their SLO: as the client saw it where the load
    has one, else as the gateway says."""
    mean_threshold: float | None
    """Over the steps of all answers."""
    migrations: int
    late_ms: float
    """By how much the generator was late, at the most."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A row, and the answers behind it."""

    row: ServeRow
    answers: list[Answer]
    slo_s: float | None


def body_of(
    messages: Sequence[list[dict[str, Any]]], model: str, *, slo_s: float | None, **extra: Any
) -> Body:
    """Streams of chat completions; `extra` goes into every body."""
    level = {} if slo_s is None else {"slo_ms": round(1000 * slo_s)}

    def body(arrival: Arrival) -> dict[str, Any]:
        return {
            "model": model,
            "messages": messages[arrival.case],
            "max_tokens": arrival.n_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **level,
            **extra,
        }

    return body


async def serve_one(
    url: str,
    workload: Workload,
    body: Body,
    *,
    load: str,
    slo_s: float | None,
    on_answer: Callable[[Answer], None],
) -> Served:
    """Drive a gateway with one load."""
    answers = await drive(url, workload, body, path=PATH, on_answer=on_answer)
    return Served(row=row_of(answers, load=load, slo_s=slo_s), answers=answers, slo_s=slo_s)


def row_of(answers: Sequence[Answer], *, load: str, slo_s: float | None) -> ServeRow:
    """What became of a load; `answers` in order of arrival."""
    done = [answer for answer in answers if answer.outcome == "done"]
    first_due_s, last_due_s = answers[0].due_at, answers[-1].due_at
    seconds = max(answer.ended_at for answer in answers) - first_due_s
    span_s = last_due_s - first_due_s
    return ServeRow(
        load=load,
        rate=(len(answers) - 1) / span_s if span_s else 0.0,
        n=len(answers),
        n_done=len(done),
        n_refused=sum(answer.outcome == "refused" for answer in answers),
        n_failed=sum(answer.outcome == "failed" for answer in answers),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        tokens_per_s=sum(answer.n_tokens for answer in done) / seconds,
        first_text_s=_percentiles([a.first_at - a.due_at for a in done if a.first_at is not None]),
        latency_s=_percentiles([answer.latency_s for answer in done]),
        attainment=sum(_is_in_time(answer, slo_s) for answer in done) / len(answers),
        mean_threshold=_mean_threshold(done),
        migrations=sum(answer.level.migrations for answer in done if answer.level),
        late_ms=1000 * max(answer.sent_at - answer.due_at for answer in answers),
    )


def _is_in_time(answer: Answer, slo_s: float | None) -> bool:
    if slo_s is not None:
        return answer.latency_s <= slo_s
    return answer.level is not None and bool(answer.level.slo_met)


def _mean_threshold(done: Sequence[Answer]) -> float | None:
    steps = [
        (answer.level.n_steps, answer.level.mean_threshold)
        for answer in done
        if answer.level is not None and answer.level.mean_threshold is not None
    ]
    n_steps = sum(n for n, _ in steps)
    return sum(n * threshold for n, threshold in steps) / n_steps if n_steps else None


def _percentiles(values: Sequence[float]) -> Percentiles:
    ordered = sorted(values)
    return Percentiles(
        p50=quantile(ordered, 0.5), p90=quantile(ordered, 0.9), p99=quantile(ordered, 0.99)
    )
