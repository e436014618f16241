"""OpenAI's answer objects, whole and in chunks, for chats and completions. Sends nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dilaserve_gateway.ask import Ask
from dilaserve_gateway.choice import Choice, Scored, Update
from dilaserve_gateway.tokenizer import ModelTokenizer

LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot say."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one call begins with."""

    id: str
    created: int
    """Wall-clock seconds since the epoch."""
    model: str


@dataclass(slots=True)
class Collected:
    """A choice's text and tokens so far."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, update: Update) -> None:
        """Append what a step brought."""
        self.text += update.text
        self.tokens += update.tokens
        self.finish_reason = update.finish_reason or self.finish_reason


class AnswerFormat(Protocol):
    """How an endpoint spells its answers."""

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first text, if the endpoint has one."""
        ...

    def chunk(self, index: int, text: str, tokens: Sequence[Scored], finish: str | None) -> Json:
        """A chunk of a stream; the last one of a choice carries its finish reason."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after all choices, with `include_usage`."""
        ...

    def whole(self, choices: Sequence[Collected], usage: Json) -> Json:
        """The answer in one piece."""
        ...


def usage_of(ask: Ask, choices: Iterable[Choice]) -> Json:
    """Prompts are counted once, whatever `n`; output up to EOS."""
    n_output = sum(choice.n_tokens for choice in choices)
    return {
        "prompt_tokens": ask.n_prompt,
        "completion_tokens": n_output,
        "total_tokens": ask.n_prompt + n_output,
    }


def logprob(confidence: float) -> float:
    """The natural logarithm of a confidence, at least LEAST_LOGPROB."""
    return max(math.log(confidence), LEAST_LOGPROB) if confidence > 0 else LEAST_LOGPROB


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: Head, ask: Ask, tokenizer: ModelTokenizer) -> None:
        self._head = head
        self._ask = ask
        self._tokenizer = tokenizer

    def opening(self, index: int) -> Json:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, text: str, tokens: Sequence[Scored], finish: str | None) -> Json:
        """See AnswerFormat."""
        return self._chunk(index, {"content": text} if text else {}, self._logprobs(tokens), finish)

    def usage_chunk(self, usage: Json) -> Json:
        """See AnswerFormat."""
        return self._object("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, choices: Sequence[Collected], usage: Json) -> Json:
        """See AnswerFormat."""
        rows = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._object("chat.completion", rows) | {"usage": usage}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        row = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._object("chat.completion.chunk", [row])
        return chunk | {"usage": None} if self._ask.include_usage else chunk

    def _object(self, kind: str, choices: list[Json]) -> Json:
        answer = _object(self._head, kind, choices)
        tier = self._ask.service_tier
        return answer if tier is None else answer | {"service_tier": self._ask.level.service_tier}

    def _logprobs(self, tokens: Sequence[Scored]) -> Json | None:
        if not self._ask.logprobs:
            return None
        return {"content": [self._entry(scored) for scored in tokens], "refusal": None}

    def _entry(self, scored: Scored) -> Json:
        entry = {
            "token": self._tokenizer.token_text(scored.token),
            "logprob": logprob(scored.confidence),
            "bytes": list(self._tokenizer.token_bytes(scored.token)),
        }
        return entry | {"top_logprobs": [dict(entry)] if self._ask.top_logprobs else []}


class CompletionFormat:
    """`text_completion`, whole and in chunks."""

    def __init__(self, head: Head, ask: Ask, tokenizer: ModelTokenizer) -> None:
        self._head = head
        self._ask = ask
        self._tokenizer = tokenizer

    def opening(self, index: int) -> None:
        """There is none."""

    def chunk(self, index: int, text: str, tokens: Sequence[Scored], finish: str | None) -> Json:
        """See AnswerFormat."""
        chunk = _object(self._head, "text_completion", [self._row(index, text, tokens, finish)])
        return chunk | {"usage": None} if self._ask.include_usage else chunk

    def usage_chunk(self, usage: Json) -> Json:
        """See AnswerFormat."""
        return _object(self._head, "text_completion", []) | {"usage": usage}

    def whole(self, choices: Sequence[Collected], usage: Json) -> Json:
        """See AnswerFormat."""
        rows = [self._row(i, c.text, c.tokens, c.finish_reason) for i, c in enumerate(choices)]
        return _object(self._head, "text_completion", rows) | {"usage": usage}

    def _row(self, index: int, text: str, tokens: Sequence[Scored], finish: str | None) -> Json:
        logprobs = self._logprobs(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[Scored]) -> Json | None:
        if not self._ask.logprobs:
            return None
        texts = [self._tokenizer.token_text(scored.token) for scored in tokens]
        values = [logprob(scored.confidence) for scored in tokens]
        top = [{t: v} for t, v in zip(texts, values, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": top if self._ask.top_logprobs else None,
            "text_offset": [scored.offset for scored in tokens],
        }


def _object(head: Head, kind: str, choices: list[Json]) -> Json:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
        "choices": choices,
    }
