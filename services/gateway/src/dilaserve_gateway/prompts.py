"""From a checked body to an Ask: chat template, tokens, defaults, and the limits of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dilaserve_gateway.ask import SEED_LIMIT, Ask
from dilaserve_gateway.errors import invalid, model_not_found, shown
from dilaserve_gateway.intake import ignored_fields
from dilaserve_gateway.model import ServedModel
from dilaserve_gateway.schema import (
    ChatBody,
    CompletionBody,
    DenoiseBody,
    GenerationBody,
    LevelHeaders,
    Message,
)
from dilaserve_gateway.tiers import Asked, Tiers

LONG_TEXT = 4096
"""Characters above which tokenizing would hold up other streams, and goes to a thread."""


class Prompter:
    """Turns bodies into Asks. All methods raise ApiError and InvalidRequestError (4xx)."""

    def __init__(
        self,
        model: ServedModel,
        *,
        block_length: int,
        max_choices: int,
        tiers: Tiers,
        draw_seed: Callable[[], int],
    ) -> None:
        self._model = model
        self._block_length = block_length
        self._max_choices = max_choices
        self._tiers = tiers
        self._draw_seed = draw_seed

    async def chat(self, body: ChatBody, headers: LevelHeaders) -> Ask:
        """Of a chat: one prompt, rendered by the model's chat template."""
        self._check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid(
                "`top_logprobs` needs `logprobs`; set it to true too.", param="top_logprobs"
            )
        _check_alternatives(body.top_logprobs, body.temperature, "top_logprobs")
        prompt = await self._render(body.messages)
        return self._ask(
            "chat",
            body,
            headers,
            [prompt],
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=bool(body.logprobs),
            top_logprobs=bool(body.top_logprobs),
        )

    async def completion(self, body: CompletionBody, headers: LevelHeaders) -> Ask:
        """Of a completion: one or several prompts of text or ids."""
        self._check_model(body.model)
        _check_best_of(body)
        _check_alternatives(body.logprobs, body.temperature, "logprobs")
        prompts = [await self._encode(prompt) for prompt in _split(body.prompt)]
        return self._ask(
            "text_completion",
            body,
            headers,
            prompts,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs is not None,
            top_logprobs=bool(body.logprobs),
        )

    async def denoise(self, body: DenoiseBody, headers: LevelHeaders) -> Ask:
        """Of a raw stream: exactly one prompt, or messages, and one choice."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either `prompt` or `messages`.", param="prompt")
        if (body.n or 1) > 1:
            raise invalid(
                "`n` is above 1; /v1/denoise streams one canvas: leave it out.", param="n"
            )
        if body.messages is not None:
            prompt = await self._render(body.messages)
        else:
            prompt = await self._encode(body.prompt or "")
        return self._ask("text_completion", body, headers, [prompt], max_tokens=body.max_tokens)

    def _ask(
        self,
        operation: str,
        body: GenerationBody,
        headers: LevelHeaders,
        prompts: list[list[int]],
        *,
        max_tokens: int | None,
        logprobs: bool = False,
        top_logprobs: bool = False,
    ) -> Ask:
        n = body.n or 1
        self._check_choices(len(prompts), n)
        if body.stream_options is not None and not body.stream:
            raise invalid(
                "`stream_options` needs `stream`; set it to true or leave the options out.",
                param="stream_options",
            )
        n_output = max_tokens or self._model.default_output
        asked = _asked(body, headers)
        for prompt in prompts:
            self._check_prompt(prompt)
            self._check_length(len(prompt), n_output, is_default=not max_tokens)
        return Ask(
            operation=operation,
            prompts=tuple(prompts),
            n_output=n_output,
            seed=(self._draw_seed() if body.seed is None else body.seed) % SEED_LIMIT,
            block_length=self._block_length,
            level=self._tiers.level(asked),
            n=n,
            temperature=body.temperature or 0.0,
            top_p=1.0 if body.top_p is None else body.top_p,
            ignore_eos=bool(body.ignore_eos),
            stops=_stops(body.stop),
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            service_tier=asked.service_tier,
            ignored=ignored_fields(body),
        )

    async def _render(self, messages: Sequence[Message]) -> list[int]:
        template = self._model.template
        if template is None:
            raise invalid(
                f"The model {self._model.id!r} has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        rows = [_row(message) for message in messages]
        encode = self._model.tokenizer.encode
        return await _off_loop(
            sum(len(row["content"]) for row in rows),
            lambda: encode(template.render(rows), add_special_tokens=False),
        )

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        encode = self._model.tokenizer.encode
        return await _off_loop(len(prompt), lambda: encode(prompt, add_special_tokens=True))

    def _check_model(self, name: str) -> None:
        if name != self._model.id:
            raise model_not_found(name, self._model.id)

    def _check_choices(self, n_prompts: int, n: int) -> None:
        if n_prompts * n > self._max_choices:
            raise invalid(
                f"{n_prompts} prompts with n={n} make {n_prompts * n} choices, and at most "
                f"{self._max_choices} are allowed; send several requests.",
                param="n",
            )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise invalid("The prompt is empty; give at least one token.", param="prompt")
        bad = next((i for i in prompt if not 0 <= i < self._model.vocab_size), None)
        if bad is not None:
            raise invalid(
                f"The prompt has the token id {shown(bad)}; give ids from 0 to "
                f"{self._model.vocab_size - 1}.",
                param="prompt",
            )

    def _check_length(self, n_prompt: int, n_output: int, *, is_default: bool) -> None:
        room = self._model.context_length - n_prompt
        if n_output <= room:
            return
        output = f"max_tokens={shown(n_output)}"
        if is_default:
            output = f"the default of {n_output} output tokens (no max_tokens is given)"
        remedy = f"set max_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise invalid(
            f"{n_prompt} prompt tokens and {output} exceed the model's context length of "
            f"{self._model.context_length}; {remedy}.",
            param="max_tokens" if room > 0 else "prompt",
            code="context_length_exceeded",
        )


async def _off_loop(n_chars: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if n_chars <= LONG_TEXT else await asyncio.to_thread(work)


def _split(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion; the schema has checked that the list is of one kind."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt) or [[]]


def _row(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: text content, and `system` for `developer`."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    row = {"role": role, "content": text}
    return row if message.name is None else row | {"name": message.name}


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _asked(body: GenerationBody, headers: LevelHeaders) -> Asked:
    """The body goes before the headers."""
    return Asked(
        slo_ms=headers.slo_ms if body.slo_ms is None else body.slo_ms,
        priority=headers.priority if body.priority is None else body.priority,
        service_tier=body.service_tier or headers.service_tier,
        min_confidence=(
            headers.min_confidence if body.min_confidence is None else body.min_confidence
        ),
    )


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            f"`best_of`={shown(body.best_of)} is not supported; leave it out, or give the value "
            "of `n`.",
            param="best_of",
            code="unsupported_parameter",
        )


def _check_alternatives(n_top: int | None, temperature: float | None, param: str) -> None:
    """Only the chosen token's confidence is known; at temperature 0 it is the highest."""
    if not n_top or (n_top == 1 and not temperature):
        return
    raise invalid(
        f"`{param}`={n_top} asks for tokens that were not chosen, which are not kept; "
        "give 0, or 1 at temperature 0.",
        param=param,
        code="unsupported_parameter",
    )
