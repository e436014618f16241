"""Writes a call's answer: as a stream of events, in one piece, or as raw deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from dilaserve_gateway.answers import AnswerFormat, Collected, Json, usage_of
from dilaserve_gateway.choice import Update
from dilaserve_gateway.course import EXTENSION
from dilaserve_gateway.errors import ApiError, internal_error
from dilaserve_gateway.gateway import OpenCall
from dilaserve_gateway.sse import DONE, KEEPALIVE, event
from dilaserve_gateway.tokenizer import ModelTokenizer

Clock = Callable[[], float]

_STEP_FACTS = ("kind", "threshold", "worker", "epoch", "rebuilt")


async def collect(call: OpenCall, answer: AnswerFormat) -> Json:
    """The whole answer. Raises ApiError when one of the choices fails."""
    choices = [Collected() for _ in call.choices]
    async with aclosing(call.updates()) as updates:
        async for update in updates:
            if update is not None:
                choices[update.index].add(update)
    return answer.whole(choices, usage_of(call.ask, call.choices)) | {EXTENSION: call.report()}


def stream_answer(
    call: OpenCall, answer: AnswerFormat, clock: Clock, keepalive_s: float
) -> AsyncGenerator[bytes, None]:
    """Events of a streamed answer, the choices interleaved; ids are `<request id>:<step>`."""
    return _stream(call, _AnswerEvents(call, answer), clock, keepalive_s)


def stream_steps(
    call: OpenCall, tokenizer: ModelTokenizer, head: Json, clock: Clock, keepalive_s: float
) -> AsyncGenerator[bytes, None]:
    """Events of a raw stream: one per denoising step, then the end. `head` goes first."""
    return _stream(call, _StepEvents(call, tokenizer, head), clock, keepalive_s)


class _AnswerEvents:
    """Chunks in OpenAI's form."""

    def __init__(self, call: OpenCall, answer: AnswerFormat) -> None:
        self._call = call
        self._answer = answer
        self._n_open = len(call.choices)

    def first(self) -> list[bytes]:
        rows = [(c.request_id, self._answer.opening(c.index)) for c in self._call.choices]
        return [event(chunk, f"{request_id}:0") for request_id, chunk in rows if chunk]

    def of(self, update: Update) -> list[bytes]:
        chunks = []
        if update.text or (update.tokens and self._call.ask.logprobs):
            chunks.append(self._answer.chunk(update.index, update.text, update.tokens, None))
        if update.finish_reason is not None:
            chunks.append(self._answer.chunk(update.index, "", (), update.finish_reason))
            self._n_open -= 1
            if self._n_open == 0 and not self._call.ask.include_usage:
                chunks[-1] |= self._report()
        return [event(chunk, _event_id(update)) for chunk in chunks]

    def last(self) -> list[bytes]:
        if not self._call.ask.include_usage:
            return []
        usage = usage_of(self._call.ask, self._call.choices)
        return [event(self._answer.usage_chunk(usage) | self._report())]

    def _report(self) -> Json:
        """For the last chunk of the stream."""
        return {EXTENSION: self._call.report()}


class _StepEvents:
    """Raw deltas of the only choice."""

    def __init__(self, call: OpenCall, tokenizer: ModelTokenizer, head: Json) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._head = head
        self._collected = Collected()

    def first(self) -> list[bytes]:
        return [event({"object": "denoise.start", **self._head}, f"{self._call.id}:0")]

    def of(self, update: Update) -> list[bytes]:
        self._collected.add(update)
        step = update.step
        if not step.positions:
            return []
        data = {
            "object": "denoise.step",
            "step": step.step,
            "positions": step.positions,
            "tokens": step.tokens,
            "texts": [self._tokenizer.token_text(token) for token in step.tokens],
            "confidences": step.confidences,
        }
        if step.source is not None:
            data |= {name: getattr(step.source, name) for name in _STEP_FACTS}
        return [event(data, _event_id(update))]

    def last(self) -> list[bytes]:
        end = {
            "object": "denoise.end",
            "finish_reason": self._collected.finish_reason,
            "text": self._collected.text,
            "usage": usage_of(self._call.ask, self._call.choices),
            EXTENSION: self._call.report(),
        }
        return [event(end)]


async def _stream(
    call: OpenCall, events: _AnswerEvents | _StepEvents, clock: Clock, keepalive_s: float
) -> AsyncGenerator[bytes, None]:
    for data in events.first():
        yield data
    sent_s = clock()
    try:
        async with aclosing(call.updates()) as updates:
            async for update in updates:
                fresh = [] if update is None else events.of(update)
                if not fresh and clock() - sent_s >= keepalive_s:
                    fresh = [KEEPALIVE]
                for data in fresh:
                    yield data
                    sent_s = clock()
    except ApiError as error:
        yield event(error.body())
    except Exception:  # the client is told; the server logs it
        yield event(internal_error().body())
        yield DONE
        raise
    else:
        for data in events.last():
            yield data
    yield DONE


def _event_id(update: Update) -> str:
    return f"{update.request_id}:{update.step.step}"
