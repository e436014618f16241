"""Whether a request can be run at all, before it is held. Knows no other request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilaserve.errors import InvalidRequestError, SettingsError
from dilaserve.store.records import MASKED
from dilaserve_gpu_worker.engine.types import EngineRequest, NeverFitsError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can run at all."""

    vocab_size: int
    max_sequence_length: int
    max_batch_tokens: int
    n_kv_tokens: int | None
    """None: there is no KV pool."""

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError, naming the field, for what no engine could run, and
        NeverFitsError for a request that is too long to run even alone."""
        _check_tokens("prompt", request.prompt, 0, self.vocab_size)
        _check_tokens("canvas", request.canvas, MASKED, self.vocab_size)
        _check_spec(request)
        _check_extras(request)
        self.check_fits(request)

    def check_fits(self, request: EngineRequest) -> None:
        """Raises NeverFitsError alone."""
        n_tokens = len(request.prompt) + request.spec.n_output
        name, limit, remedy = self._tightest()
        if n_tokens > limit:
            raise NeverFitsError(
                f"request {request.request_id} has {n_tokens} tokens, prompt and output, more "
                f"than {name} ({limit}); shorten the prompt or the output{remedy}"
            )

    def check_block(self, block_length: int) -> None:
        """Raises SettingsError where there is no room for a block behind the shortest prompt."""
        name, limit, remedy = self._tightest()
        if 1 + block_length > limit:
            raise SettingsError(
                f"DILASERVE_BLOCK_LENGTH={block_length}: a prompt of one token and a block are "
                f"more tokens than {name} ({limit}); use shorter blocks{remedy}"
            )

    def _tightest(self) -> tuple[str, int, str]:
        """The smallest limit: its name, its tokens, and how it is raised."""
        limits = [
            ("the model's max_sequence_length", self.max_sequence_length, ""),
            (
                "the token budget of a pass",
                self.max_batch_tokens,
                ", or raise DILASERVE_MAX_BATCH_TOKENS",
            ),
        ]
        if self.n_kv_tokens is not None:
            limits.append(("the KV pool", self.n_kv_tokens, ", or raise DILASERVE_KV_TOKENS"))
        return min(limits, key=lambda each: each[1])


def _check_extras(request: EngineRequest) -> None:
    if request.confidences is not None and len(request.confidences) != len(request.canvas):
        raise InvalidRequestError(
            f"{len(request.confidences)} confidences for {len(request.canvas)} canvas positions; "
            "give one for each",
            param="confidences",
        )
    if request.quota is not None and request.quota < 1:
        raise InvalidRequestError(f"quota {request.quota} is below 1; use 1", param="quota")


def _check_tokens(name: str, tokens: list[int], least: int, vocab_size: int) -> None:
    if tokens and not (min(tokens) >= least and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not least <= token < vocab_size)
        raise InvalidRequestError(
            f"{name} holds token {wrong}, outside the model's vocabulary of {vocab_size}; "
            "tokenize it with the model's own tokenizer",
            param=name,
        )


def _check_spec(request: EngineRequest) -> None:
    spec = request.spec
    if len(request.canvas) != spec.n_output:
        raise InvalidRequestError(
            f"canvas holds {len(request.canvas)} positions, n_output is {spec.n_output}; "
            "make them equal",
            param="canvas",
        )
    for name, value in (("n_output", spec.n_output), ("block_length", spec.block_length)):
        if value < 1:
            raise InvalidRequestError(f"{name} {value} is below 1; use for example 32", param=name)
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        raise InvalidRequestError(
            f"temperature {spec.temperature} is no number from 0; use for example 1.0",
            param="temperature",
        )
    if not 0 < spec.top_p <= 1:
        raise InvalidRequestError(
            f"top_p {spec.top_p} is not above 0 and at most 1; use for example 0.95", param="top_p"
        )
