"""The bodies that clients send, as OpenAI's API has them, with DiLaServe's extensions.

Each field's description completes "give …", and so is the remedy of its error message. Knows
types and ranges; what depends on the model is judged in `prompts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dilaserve_gateway.tiers import AskedTier

Role = Literal["system", "developer", "user", "assistant"]

SloMs = Annotated[
    int | None,
    Field(ge=1, le=86_400_000, description="the latency objective in whole milliseconds"),
]
Priority = Annotated[
    int | None,
    Field(ge=-1000, le=1000, description="an integer from -1000 to 1000; higher goes first"),
]
MinConfidence = Annotated[
    float | None,
    Field(ge=0, le=1, description="the lowest confidence threshold to allow, from 0 to 1"),
]
ServiceTier = Annotated[
    AskedTier | None, Field(description="auto, default, flex, scale or priority")
]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
""""1" is no number. What is unknown is kept in `model_extra`."""


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = STRICT

    include_usage: Annotated[bool | None, Field(description="true or false")] = None


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = STRICT

    type: Annotated[Literal["text"], Field(description="'text': other parts are not supported")]
    text: Annotated[str, Field(description="a string")]


class Message(BaseModel):
    """One message of a chat."""

    model_config = STRICT

    role: Annotated[Role, Field(description="system, developer, user or assistant")]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)],
        Field(
            description="a string, or a list of {'type': 'text', 'text': ...} (no images, no tools)"
        ),
    ]
    name: Annotated[str | None, Field(description="a string")] = None


class GenerationBody(BaseModel):
    """What all generating endpoints take."""

    model_config = STRICT

    model: Annotated[str, Field(description="the name of a served model; see /v1/models")]
    stream: Annotated[bool | None, Field(description="true or false")] = None
    stream_options: Annotated[
        StreamOptions | None, Field(description="an object like {'include_usage': true}")
    ] = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=4, fail_fast=True)] | None,
        Field(description="a string of 1 to 1000 characters, or a list of up to 4 of them"),
    ] = None
    n: Annotated[
        int | None, Field(ge=1, le=128, description="how many choices to generate, from 1")
    ] = None
    seed: Annotated[
        int | None, Field(ge=-(2**63), lt=2**63, description="an integer of 64 bits")
    ] = None
    temperature: Annotated[
        float | None, Field(ge=0, le=2, description="a number from 0 (greedy) to 2")
    ] = None
    top_p: Annotated[
        float | None, Field(gt=0, le=1, description="a number above 0 and at most 1")
    ] = None
    max_tokens: Annotated[
        int | None, Field(ge=1, description="the length of the output in tokens, from 1")
    ] = None
    service_tier: ServiceTier = None
    user: Annotated[str | None, Field(description="a string")] = None
    ignore_eos: Annotated[
        bool | None, Field(description="true to fill the canvas to its end, or false")
    ] = None
    slo_ms: SloMs = None
    priority: Priority = None
    min_confidence: MinConfidence = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Field(
            min_length=1,
            fail_fast=True,
            description="a list of at least one message with role and content",
        ),
    ]
    max_completion_tokens: Annotated[
        int | None, Field(ge=1, description="the length of the output in tokens, from 1")
    ] = None
    logprobs: Annotated[bool | None, Field(description="true or false")] = None
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="0, or 1 at temperature 0")
    ] = None


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)],
        Field(description="a string, a list of strings, token ids, or a list of lists of ids"),
    ]
    logprobs: Annotated[int | None, Field(ge=0, le=5, description="0, or 1 at temperature 0")] = (
        None
    )
    best_of: Annotated[int | None, Field(ge=1, description="nothing, or the value of n")] = None


class DenoiseBody(GenerationBody):
    """Body of /v1/denoise: a completion's, or a chat's `messages` in place of the prompt. It is
    always streamed, and always with confidences."""

    prompt: Annotated[
        str | TokenIds | None, Field(description="a string or token ids, or `messages` instead")
    ] = None
    messages: Annotated[
        list[Message] | None,
        Field(
            min_length=1,
            fail_fast=True,
            description="a list of at least one message, or `prompt` instead",
        ),
    ] = None


class LevelHeaders(BaseModel):
    """Extensions given as headers, where the body is out of the client's hands."""

    model_config = ConfigDict(allow_inf_nan=False)

    slo_ms: Annotated[SloMs, Field(alias="x-slo-ms")] = None
    priority: Annotated[Priority, Field(alias="x-priority")] = None
    service_tier: Annotated[ServiceTier, Field(alias="x-service-tier")] = None
    min_confidence: Annotated[MinConfidence, Field(alias="x-min-confidence")] = None


_NO_TOOLS = "tools are not supported: leave it out and describe them in the prompt"
_NO_PENALTY = "penalties are not supported: leave it out or give 0"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((None, False), "leave it out"),
    "suffix": ((None, ""), "leave it out"),
    "best_of": ((None, 1), "leave it out, or give the value of `n`"),
    "tools": ((None, []), _NO_TOOLS),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "functions": ((None, []), _NO_TOOLS),
    "function_call": ((None, "none", "auto"), _NO_TOOLS),
    "response_format": ((None, {"type": "text"}), "only {'type': 'text'} is supported"),
    "logit_bias": ((None, {}), "biases are not supported: leave it out"),
    "frequency_penalty": ((None, 0), _NO_PENALTY),
    "presence_penalty": ((None, 0), _NO_PENALTY),
    "modalities": ((None, ["text"]), "only ['text'] is supported"),
    "audio": ((None,), "only text is supported: leave it out"),
    "prediction": ((None,), "predicted outputs are not supported: leave it out"),
    "web_search_options": ((None,), "web search is not supported: leave it out"),
}
"""OpenAI's fields that would change the answer: values that do not, and the remedy for others."""
